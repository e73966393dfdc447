"""Fields, ids and heads that a step cannot read: every rank names them, whichever stage or data rank would fail on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import ClippedPGLossFn
from parallel_rl.testing.pool import preload, run_world
from tests.distributed.megatron_cases import VOCAB, Case, make_data, make_loss, make_model, split

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

Batch = dict[str, Any]
Change = Callable[[Batch], Mapping[str, object]]


def _with(name: str, change: Callable[[Tensor], object]) -> Change:
    return lambda batch: {name: change(batch[name])}


def _at(name: str, value: float, column: int) -> Change:
    """A value in the first row."""

    def change(batch: Batch) -> Batch:
        field = batch[name].clone()
        field[0, column] = value
        return {name: field}

    return change


def _first_valid(batch: Batch) -> int:
    return int(batch["token_mask"][0, 1:].bool().nonzero()[0, 0]) + 1


def _scored(name: str, value: float) -> Change:
    return lambda batch: _at(name, value, _first_valid(batch))(batch)


def _padded_left(batch: Batch) -> Batch:
    return {"attention_mask": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]) > 2}


def _reset_positions(batch: Batch) -> Batch:
    return {"position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]) % 4}


ABOVE = "prev_logprobs is "
#: what is wrong with each micro-batch, and what every rank says
FIELDS: dict[str, tuple[Change, str]] = {
    "advantages of rows": (_with("advantages", lambda x: x[:, 0]), "advantages has shape [2]; input_ids [B, S] = [2, 16]"),
    "responses alone": (_with("prev_logprobs", lambda x: x[:, 8:]), "prev_logprobs has shape [2, 8]; input_ids [B, S] ="),
    "a mask of one column": (_with("token_mask", lambda x: x[:, :1]), "token_mask has shape [2, 1]; input_ids [B, S] ="),
    "integer advantages": (_with("advantages", Tensor.long), "advantages must be floating point, got torch.int64"),
    "a list": (_with("advantages", Tensor.tolist), "advantages must be a tensor, got list"),
    "float ids": (_with("input_ids", Tensor.float), "input_ids must be int64 or int32 [B, S], got torch.float32"),
    "short ids": (_with("input_ids", Tensor.short), "input_ids must be int64 or int32 [B, S], got torch.int16"),
    "NaN": (_scored("advantages", torch.nan), "advantages is NaN at [0,"),
    "a gradient": (_with("advantages", lambda x: x.requires_grad_()), "advantages requires a gradient"),
    "probabilities": (_with("prev_logprobs", Tensor.exp), "above 0; these are probably probabilities"),
    "a changed sign": (_with("prev_logprobs", Tensor.neg), "above 0; these are probably log-probs with the sign changed"),
    "a scored id beyond the tokens": (_scored("input_ids", VOCAB), "lies outside the"),
}  # fmt: skip
#: of a callback: one of each look, at shapes, kinds and values of fields and ids; each needs process groups of its own
CALLBACKS = ("a mask of one column", "a list", "NaN", "a scored id beyond the tokens")
#: seen where the library makes the model's input
INPUTS: dict[str, tuple[Change, str]] = {
    "a label of nothing": (_at("input_ids", -100, 0), "input_ids = -100 at [0, 0] lies outside the model's vocabulary"),
    "a prompt beyond the columns": (_at("input_ids", VOCAB + 1, 0), f"input_ids = {VOCAB + 1} at [0, 0] lies outside the"),
    "padding on the left": (_padded_left, "attention_mask is 0 at [0, 0], so row 0 is padded on the left"),
    "positions that begin again": (_reset_positions, "; padded_batch takes one sequence per row, from column 0 on"),
}  # fmt: skip


def _rows() -> list[Batch]:
    """Three micro-batches, the same on every rank, whose column 0 is a prompt."""
    return split({name: field for name, field in make_data("ragged").items() if name != "lengths"}, 3)


def _outcome(call: Callable[[], object]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except ValueError as error:
            return f"ValueError: {error}"
    return "; ".join(sorted({str(each.message) for each in caught if each.category is UserWarning}))


def _own(
    model: torch.nn.Module, loss_fn: Any, batches: Sequence[Batch], around: Callable[[Any], Any] | None = None
) -> None:
    """A step of Megatron's schedule, with a function of the user's around the callback."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import parallel_rl.megatron as M
    from parallel_rl import ParallelGroups, count_valid

    counts = count_valid(_rows(), ParallelGroups.from_megatron().data)
    right = _rows()

    def step(queue: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        index, data = next(queue)
        loss_func = M.megatron_loss_func(
            loss_fn, data, *counts, config=M.unwrap(model).config, num_microbatches=len(batches)
        )
        output = M.forward_logits(model, M.padded_input(right[index]["input_ids"]))
        return output, loss_func if around is None else around(loss_func)

    get_forward_backward_func()(
        forward_step_func=step, data_iterator=iter(enumerate(batches)), model=[model], num_microbatches=len(batches),
        seq_length=16, micro_batch_size=2, forward_only=False,
    )  # fmt: skip


def _of_steps(rank: int, sizes: dict[str, int]) -> dict[str, str]:
    import parallel_rl.megatron as M

    M.initialize(**sizes)
    case = Case(**sizes)  # type: ignore[arg-type]
    model, loss_fn = M.wrap_model(make_model(case)), make_loss(Case(loss="pg"))
    outcomes = {}
    for name, (change, _) in (FIELDS | INPUTS).items():
        batches = [batch | change(batch) for batch in _rows()]
        outcomes[name] = _outcome(partial(M.forward_backward, model, loss_fn, batches))
    step = partial(M.forward_backward, model, loss_fn)
    other = M.fuse_head(M.wrap_model(make_model(case)))
    outcomes["a head of another kind"] = _outcome(lambda: step(_rows(), head=object()))  # type: ignore[arg-type]
    outcomes["the head of another model"] = _outcome(lambda: step(_rows(), head=other))
    outcomes["nothing"] = _outcome(lambda: step([]))
    many = ClippedPGLossFn(vocab_size=64)
    outcomes["more tokens than columns"] = _outcome(lambda: M.forward_backward(model, many, _rows()))
    outcomes["right"] = _outcome(lambda: step(_rows()))
    ones, zeros = ([batch | change(batch) for batch in _rows()] for change in (
        _with("token_mask", torch.ones_like), _with("prev_logprobs", torch.zeros_like)
    ))  # fmt: skip
    outcomes["ones"] = _outcome(lambda: M.forward_backward(M.wrap_model(make_model(case)), loss_fn, ones))
    outcomes["zeros"] = _outcome(lambda: step(zeros))
    model.requires_grad_(False)
    frozen = M.wrap_model(make_model(case))
    frozen.requires_grad_(False)
    outcomes["frozen"] = _outcome(lambda: M.forward_backward(frozen, loss_fn, _rows()))
    M.destroy()
    return outcomes


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {}], ids=["tp", "pp", "dp"])
def test_a_step_names_what_it_cannot_read_on_every_rank(sizes: dict[str, int]) -> None:
    """The last stage alone named it and the first one waited; torch named it; or nothing did."""
    ranks = run_world(2, _of_steps, sizes)
    wanted = {name: message for name, (_, message) in (FIELDS | INPUTS).items()} | {
        "a head of another kind": "head must be what `fuse_head` returned for this model, got object",
        "the head of another model": "head is the fused head of another model",
        "more tokens than columns": "the loss has vocab_size = 64, the model's vocabulary only 3",
        "nothing": "batches is empty on this data rank, and",
    }
    for name, message in wanted.items():
        for outcome in (outcomes[name] for outcomes in ranks):
            assert outcome.startswith("ValueError: ") and message in outcome, (name, outcome)
    warned = {"ones": "token_mask is 1 at every place", "zeros": "prev_logprobs is 0 at all"}
    for name, message in warned.items():  # by the first rank, and by those that compute the loss
        assert any(message in outcomes[name] for outcomes in ranks), (name, [outcomes[name] for outcomes in ranks])
    for outcomes in ranks:
        assert outcomes["right"] == ""
        assert ("this pipeline stage" if "pp" in sizes else "ValueError: no parameter of the model") in outcomes[
            "frozen"
        ]


def _halved(loss_func: Any) -> Any:
    def half(output: Tensor) -> Any:
        loss, *report = loss_func(output)
        return loss / 2, *report

    return half


def _with_tokens(loss_func: Any) -> Any:
    """As a callback of Megatron-LM returns a number of tokens too, by which the schedule divides."""

    def three(output: Tensor) -> Any:
        loss, report = loss_func(output)
        return loss, torch.tensor(10), report

    return three


def _of_callbacks(rank: int, sizes: dict[str, int]) -> dict[str, str]:
    import parallel_rl.megatron as M

    outcomes = {}

    def run(name: str, batches: Sequence[Batch], around: Callable[[Any], Any] | None = None, **fields: bool) -> None:
        M.initialize(**sizes)
        case = Case(**sizes, **fields)  # type: ignore[arg-type]
        model = M.wrap_model(make_model(case))
        outcomes[name] = _outcome(lambda: _own(model, make_loss(Case(loss="pg")), batches, around))
        if name == "right":
            outcomes["made in evaluation"] = _made_in_evaluation(model)
        M.destroy()  # ends what is under way between stages

    for name in CALLBACKS if "pp" in sizes else ("NaN",):
        run(name, [batch | FIELDS[name][0](batch) for batch in _rows()])
    run("right", _rows())
    run("right, by Megatron's mean", _rows(), per_token=False)
    run("halved", _rows(), _halved)
    run("halved, by Megatron's mean", _rows(), _halved, per_token=False)
    run("divided by tokens", _rows(), _with_tokens, per_token=False)
    return outcomes


def _made_in_evaluation(model: torch.nn.Module) -> str:
    """A callback that no schedule calls, as on a stage that computes no loss."""
    import parallel_rl.megatron as M

    batch = _rows()[0]
    batch |= FIELDS["a mask of one column"][0](batch)
    counts = torch.tensor(2), torch.tensor(10)
    config = M.unwrap(model).config
    with torch.no_grad():
        return _outcome(
            lambda: M.megatron_loss_func(make_loss(Case(loss="pg")), batch, *counts, config=config, num_microbatches=1)
        )


@pytest.mark.parametrize(
    "sizes", [pytest.param({"pp": 2}, id="pp"), pytest.param({"cp": 2}, id="cp", marks=pytest.mark.slow)]
)
def test_a_callback_names_what_its_loss_cannot_read_on_every_stage(sizes: dict[str, int]) -> None:
    """And a function around it that changes the gradient, which no metric shows."""
    ranks = run_world(2, _of_callbacks, sizes)
    for name in CALLBACKS if "pp" in sizes else ("NaN",):
        for outcome in (outcomes[name] for outcomes in ranks):
            assert outcome.startswith("ValueError: ") and FIELDS[name][1] in outcome, (name, outcome)
    for outcomes in ranks:
        assert FIELDS["a mask of one column"][1] in outcomes["made in evaluation"], outcomes["made in evaluation"]
    last = ranks[-1]
    assert {outcomes[name] for outcomes in ranks for name in ("right", "right, by Megatron's mean")} == {""}
    assert all("multiplied by 0.5 on its way" in last[name] for name in ("halved", "halved, by Megatron's mean")), last
    assert f"multiplied by {1 / 10 / (2 if 'cp' in sizes else 1):.6g} on its way" in last["divided by tokens"], last
