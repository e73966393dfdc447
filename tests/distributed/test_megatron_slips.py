"""Wrong uses of a Megatron loop on two ranks: named on both of them before backward, and right uses beside them that pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import NLLLoss, ParallelGroups, PolicyLossFn, count_valid, global_group_ids, token_logprobs
from parallel_rl.counts import count_rows
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.validation import validation
from tests.collectives import recorded

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

V, S, D = 32, 16, 16  # the hidden size is that of a shard of the vocabulary
Layout = Literal["tp", "cp", "pp", "dp"]
Batch = dict[str, Tensor]
RIGHT = "right"


def rows(seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, V, (2, S), generator=g),
        "token_mask": (torch.rand(2, S, generator=g) < 0.8).float(),
        "sample_mask": torch.ones(2),
        "advantages": torch.randn(2, S, generator=g),
        "prev_logprobs": -torch.rand(2, S, generator=g) * 3,
    }


def build(parallel_output: bool = True, vocab_size: int = V, wraps: bool = True, seed: int = 0) -> torch.nn.Module:
    import parallel_rl.megatron as M

    config = M.build_config(num_layers=2, hidden_size=D, num_attention_heads=4)
    model = M.build_model(config, vocab_size, S, seed=seed)
    model.parallel_output = parallel_output
    return M.wrap_model(model) if wraps else model


def outcome(case: Callable[[], object]) -> str:
    """The error or the warnings of a case, or that it is right."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            case()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    told = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    words = ("record them in float32", "parallel_output", "vocab_size", "sample_mask", "inverted", "hold the same rows")
    ours = [text for text in told if any(word in text for word in words)]
    return "; ".join(ours) or RIGHT


def whole_step(rank: int) -> dict[str, Callable[[], object]]:
    """Data of the second rank that differs from the first one's, in `forward_backward`."""
    import parallel_rl.megatron as M

    model, loss_fn = build(), PolicyLossFn(vocab_size=V)

    def step(change: Callable[[Batch], Batch], *more: Batch) -> object:
        batch = rows()
        return M.forward_backward(model, loss_fn, [*more, change(batch) if rank else batch])

    def moved(name: str) -> Callable[[Batch], Batch]:
        return lambda batch: {**batch, name: batch[name].roll(1, 0)}

    def prompt(batch: Batch) -> Batch:
        ids = batch["input_ids"].clone()
        ids[:, 0] = (ids[:, 0] + 1) % V  # is never scored
        return {**batch, "input_ids": ids}

    def masked(batch: Batch) -> Batch:
        return {**batch, "advantages": torch.where(batch["token_mask"] > 0, batch["advantages"], torch.nan)}

    def rounded(batch: Batch) -> Batch:
        return {**batch, "advantages": batch["advantages"] * (1 + 1e-6)}

    def labels(batch: Batch) -> Batch:
        return {**batch, "shift_labels": batch["input_ids"].roll(-1, 1)}

    return {
        "other rows": lambda: step(lambda _: rows(1)),
        "other rows of a later micro-batch": lambda: step(lambda _: rows(1), rows()),
        "another prompt": lambda: step(prompt),
        "another mask": lambda: step(moved("token_mask")),
        "other advantages": lambda: step(moved("advantages")),
        "other old log-probs": lambda: step(moved("prev_logprobs")),
        "labels beside ids": lambda: M.forward_backward(model, loss_fn, [labels(rows())]),
        "labels beside ids on one rank": lambda: step(labels),
        "NaN in masked places of one rank": lambda: step(masked),
        "advantages rounded otherwise": lambda: step(rounded),
        "the same rows": lambda: step(lambda batch: batch),
    }


def cut(batch: Batch, size: int, rank: int) -> Batch:
    """Two chunks of each row, as Megatron's get_batch_on_this_cp_rank cuts them."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    wide = {name: field.repeat(1, 2) if field.dim() > 1 else field for name, field in batch.items()}
    return {**batch, **get_batch_on_this_cp_rank({name: field for name, field in wide.items() if field.dim() > 1})}


def bare(rank: int, groups: ParallelGroups) -> dict[str, Callable[[], object]]:
    """The same slips in a call of the loss."""
    cp, width = groups.cp_size, V // groups.tp_size
    g = torch.Generator().manual_seed(7 + groups.tp_rank)
    logits = torch.randn(2, S // cp, width, generator=g)

    def call(batch: Batch, toks: float = 30, z: Tensor = logits, loss: object = None, mode: str = "auto") -> object:
        loss_fn = PolicyLossFn(vocab_size=V) if loss is None else loss
        with validation(mode):  # type: ignore[arg-type]
            return loss_fn(z, batch, 2, toks, None, groups.tensor, groups.context)  # type: ignore[operator]

    def changed(name: str) -> Batch:
        batch = rows()
        return {**batch, name: batch[name].flip(0)} if rank else batch

    def from_logprobs() -> object:
        data = {name: field[:, rank * S // 2 :][:, : S // 2] for name, field in rows().items() if field.dim() > 1}
        data |= {"sample_mask": torch.ones(2), "response_mask": data.pop("token_mask")}
        return PolicyLossFn().from_logprobs(
            data["prev_logprobs"], data=data, global_valid_seqs=2, global_valid_toks=30 + rank,  # type: ignore[arg-type]
            context_parallel_group=dist.group.WORLD,
        )  # fmt: skip

    both = {**rows(), "shift_labels": rows()["input_ids"]}
    return {
        "counts by rank": lambda: call(rows(), 30 + rank),
        "counts of the host by rank": lambda: call(rows(), torch.tensor(30 + rank)),  # type: ignore[arg-type]
        "ids by rank": lambda: call(changed("input_ids")),
        "advantages by rank": lambda: call(changed("advantages")),
        "ids by rank in log-probs": lambda: token_logprobs(
            logits, changed("input_ids"), None, groups.tensor, groups.context, vocab_size=V
        ),
        "labels beside ids": lambda: call(both),
        "labels beside ids are counted": lambda: count_valid(both),
        "one split of log-probs, two counts": from_logprobs,
        "nothing is looked at": lambda: call(rows(), 30 + rank, mode="never"),
        "the same": lambda: call(rows()),
    }


def of_tensor_ranks(rank: int, groups: ParallelGroups) -> dict[str, Callable[[], object]]:
    import parallel_rl.megatron as M

    def gathered() -> object:
        return M.forward_backward(build(parallel_output=False), NLLLoss(vocab_size=V), [rows()])

    def loss_of(width: int, vocab_size: int | None, same: bool) -> object:
        g = torch.Generator().manual_seed(0 if same else rank)
        logits = torch.randn(2, S, width, generator=g)
        return NLLLoss(vocab_size=vocab_size)(logits, rows(), 2, 30, None, groups.tensor)

    def fused(inside: str) -> object:
        model = build()
        head = M.fuse_head(model)
        batch, inputs = rows(), M.padded_input(rows()["input_ids"])
        counts = count_valid(batch)
        output = M.forward_logits(model, inputs)
        if inside == "log-probs":
            return token_logprobs(output, batch, None, groups.tensor)
        if inside == "a view":
            return NLLLoss()(output.transpose(0, 1).transpose(0, 1), batch, *counts, None, groups.tensor)
        if inside == "logits":
            with head.logits():
                output = M.forward_logits(model, inputs)
        function = M.megatron_loss_func(
            NLLLoss(), batch, *counts, config=model.config,
            num_microbatches=1, head=head if inside == "head" else None,
        )  # fmt: skip
        return function(output)

    def padded(vocab_size: int | None, true: int = V - 1, by_megatron: int = 0) -> object:
        model = build(vocab_size=true)
        if by_megatron:
            of = model.module
            of.true_vocab_size, of.vocab_size = None, by_megatron
        return M.forward_backward(model, NLLLoss(vocab_size=vocab_size), [rows()])

    def warning_as_error() -> object:
        """The first rank warned alone, behind the check that ranks share: the second one waited for it."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*vocab_size = None")
            return padded(None, by_megatron=1024)

    def own_schedule(vocab_size: int | None) -> object:
        config, columns = build(wraps=False).config, 768
        g = torch.Generator().manual_seed(rank)
        batch, loss_fn = rows(), NLLLoss(vocab_size=vocab_size)
        function = M.megatron_loss_func(
            loss_fn, batch, *count_valid(batch), config=config, num_microbatches=1, ddp=False
        )
        return function(torch.randn(2, S, columns // 2, generator=g))

    return {
        "gathered logits": gathered,
        "gathered logits in a bare loss": lambda: loss_of(V, V, same=True),
        "gathered logits of unknown size": lambda: loss_of(V, None, same=True),
        "shards": lambda: loss_of(V // 2, None, same=False),
        "a fused head without head=": lambda: fused("callback"),
        "a fused head without head=, a view": lambda: fused("a view"),
        "a fused head without head=, log-probs": lambda: fused("log-probs"),
        "a fused head with head=": lambda: fused("head"),
        "a fused head taken off": lambda: fused("logits"),
        "padding without vocab_size": lambda: padded(None),
        "padding with its size": lambda: padded(V - 1),
        "padding with that of the padding": lambda: padded(V),
        "Megatron's padding": lambda: padded(None, by_megatron=512),  # of 500 on two tensor ranks
        "a warning as an error": warning_as_error,
        "Megatron's padding in its own schedule": lambda: own_schedule(None),
        "Megatron's padding is said once": lambda: own_schedule(None),
        "Megatron's padding with its size": lambda: own_schedule(700),
    }


def of_context_ranks(rank: int, groups: ParallelGroups) -> dict[str, Callable[[], object]]:
    import parallel_rl.megatron as M

    model = build()
    return {"rows cut before": lambda: M.forward_backward(model, PolicyLossFn(vocab_size=V), [cut(rows(), 2, rank)])}


def other_setup(rank: int) -> dict[str, Callable[[], object]]:
    """Losses and weights of the second rank that are not the first one's; only the data were compared."""
    import parallel_rl.megatron as M

    def warmer(**options: float) -> PolicyLossFn:
        return PolicyLossFn(vocab_size=V, **options)

    def callback() -> object:
        config, loss_fn = build().config, warmer(temperature=1 + rank / 2)
        batch = rows()
        return M.megatron_loss_func(loss_fn, batch, *count_valid(batch), config=config, num_microbatches=1)

    def inverted() -> object:
        batches = [rows(), rows(1)]
        for batch in batches:
            batch["token_mask"][:, 0] = 1
        return M.forward_backward(build(), warmer(), batches)

    def half() -> object:
        batch = rows()
        return M.forward_backward(build(), warmer(), [{**batch, "prev_logprobs": batch["prev_logprobs"].bfloat16()}])

    return {
        "an inverted mask": inverted,
        "log-probs of 16 bits": half,
        "the same rows": lambda: M.forward_backward(build(), warmer(), [rows()]),
        "another temperature": lambda: M.forward_backward(build(), warmer(temperature=1 + rank / 2), [rows()]),
        "another temperature in a callback": callback,
        "another class": lambda: M.forward_backward(build(), (warmer(), NLLLoss(vocab_size=V))[rank], [rows()]),
        "another seed": lambda: M.forward_backward(build(seed=rank), warmer(), [rows()]),
    }


def work(rank: int, layout: Layout) -> dict[str, str]:
    import parallel_rl.megatron as M

    M.initialize(**({} if layout == "dp" else {layout: 2}))  # type: ignore[arg-type]
    groups = ParallelGroups.from_megatron()
    cases = {f"step: {name}": case for name, case in whole_step(rank).items()} | other_setup(rank)
    if layout in ("tp", "cp"):
        cases |= {f"bare: {name}": case for name, case in bare(rank, groups).items()}
        cases |= (of_tensor_ranks if layout == "tp" else of_context_ranks)(rank, groups)
    return {name: outcome(case) for name, case in cases.items()}


_TENSOR, _CONTEXT = "seed the sampler by the data rank alone", "give whole rows, the loss cuts them"
_BOTH = "data has input_ids and shift_labels, and each says what is scored"
_SAME = ("NaN in masked places of one rank", "advantages rounded otherwise", "the same rows")
_STEP = {
    "other rows": "input_ids differs between rank 0 and rank 1",
    "other rows of a later micro-batch": "input_ids of micro-batch 1 differs between rank 0 and rank 1",
    "another prompt": "input_ids differs between",
    "another mask": "token_mask differs between",
    "other advantages": "advantages differs between",
    "other old log-probs": "prev_logprobs differs between",
}
_CALL = {
    "counts by rank": "global_valid_toks differs between rank 0 and rank 1: 30 and 31; ",
    "counts of the host by rank": "global_valid_toks differs between rank 0 and rank 1: 30 and 31; ",
    "ids by rank": "input_ids differs between rank 0 and rank 1; ",
    "ids by rank in log-probs": "input_ids differs between rank 0 and rank 1; ",
    "advantages by rank": "advantages differs between rank 0 and rank 1; ",
    "labels beside ids": _BOTH,
    "labels beside ids are counted": _BOTH,
    "one split of log-probs, two counts": "global_valid_toks differs between rank 0 and rank 1: 30 and 31",
    "nothing is looked at": RIGHT,
    "the same": RIGHT,
}
_OF_TENSOR_RANKS = {
    "gathered logits": "parallel_output = False, which gathers the whole vocabulary on every tensor rank",
    "gathered logits in a bare loss": "so the first alone holds all of vocab_size = 32",
    "gathered logits of unknown size": "the vocabulary shards are bit-equal on all tensor ranks",
    "shards": RIGHT,
    "a fused head without head=": "the model has a fused head, so its output [2, 16, 16] is hidden states, not logits",
    "a fused head without head=, a view": "is hidden states, not logits",
    "a fused head without head=, log-probs": "is hidden states, not logits",
    "a fused head with head=": RIGHT,
    "a fused head taken off": RIGHT,
    "a warning as an error": "vocab_size = None, the model 1024 columns (512 on each tensor rank)",
    "padding with its size": RIGHT,
    "Megatron's padding is said once": RIGHT,
    "Megatron's padding with its size": RIGHT,
}
_WARNED = {  # on the first rank
    "padding without vocab_size": "vocab_size = None, the model 32 columns (16 on each tensor rank), 31 of which are tokens",
    "padding with that of the padding": "vocab_size = 32, the model 32 columns (16 on each tensor rank), 31 of which are",
    "Megatron's padding in its own schedule": "vocab_size = None, the model 768 columns (384 on each tensor rank), a multiple",
    "Megatron's padding": "512 columns (256 on each tensor rank), a multiple of what Megatron pads to",
}


@pytest.mark.parametrize("layout", ["tp", "cp", "pp", pytest.param("dp", marks=pytest.mark.slow)])
def test_each_slip_is_named_on_both_ranks(layout: Layout) -> None:
    advice = {"tp": _TENSOR, "pp": _TENSOR, "cp": _CONTEXT, "dp": ""}
    step = (
        dict.fromkeys(_STEP, (RIGHT,)) if layout == "dp" else {name: (t, advice[layout]) for name, t in _STEP.items()}
    )
    step |= {f"labels beside ids{where}": (_BOTH,) for where in ("", " on one rank")}
    step |= dict.fromkeys(_SAME, (RIGHT,))
    want = {f"step: {name}": texts for name, texts in step.items()}
    want |= dict.fromkeys(("another temperature", "another class"), ("differ in the loss (a checksum",))
    want["another temperature in a callback"] = (RIGHT if layout == "pp" else "differ in the loss (a checksum",)
    want["another seed"] = ("differ in the model's weights (a checksum",) if layout in ("cp", "dp") else (RIGHT,)
    alone = {"an inverted mask": "Is the mask inverted?"}  # on the first rank
    alone |= {"log-probs of 16 bits": "prev_logprobs is torch.bfloat16, which rounds log-probs"}
    alone |= {"the same rows": "all 2 data ranks hold the same rows" if layout == "dp" else RIGHT}
    want |= {name: (text,) for name, text in alone.items()}
    if layout in ("tp", "cp"):
        want |= {f"bare: {name}": (text,) for name, text in _CALL.items()}
    if layout == "tp":
        want |= {name: (text,) for name, text in (_OF_TENSOR_RANKS | _WARNED).items()}
    if layout == "cp":
        want["rows cut before"] = ("input_ids differs between rank 0 and rank 1", _CONTEXT)
    first, second = run_world(2, work, layout, timeout=120)
    assert first.keys() == second.keys() == want.keys()
    silent = {
        name: each[name]
        for name, texts in want.items()
        for each in ([first] if name in _WARNED or name in alone else [first, second])
        if not all(text in each[name] for text in texts)
    }
    assert not silent


def ids_and_empty_rows(rank: int) -> tuple[list[list[int]], list[int], list[str], int, float]:
    import parallel_rl.megatron as M

    M.initialize()
    group = ParallelGroups.from_megatron().data
    local = [torch.tensor([0, 0, 1, 1]), torch.tensor([-1, 2, 0]), torch.empty(0, dtype=torch.int64)]
    with recorded() as ops:
        mine = [global_group_ids(local[0], group)]
    mine += [global_group_ids(local[1 + rank], group), global_group_ids(local[2 - rank], group)]
    batch = rows()
    batch["token_mask"][rank:] = 0  # both rows of the first rank, and one of the second
    batch["sample_mask"][0] = 1 - rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts, empty = count_rows([batch, rows()], group)
    told = sum("sample_mask 1 have no valid token" in str(each.message) for each in caught)
    report = M.forward_backward(build(), PolicyLossFn(vocab_size=V), [batch, rows()])
    return (
        [ids.tolist() for ids in mine],
        [int(counts.seqs), int(empty), told],
        ops,
        int(report.counts.seqs),
        report.floats()["empty_rows"],
    )


def test_ids_become_global_and_empty_rows_are_counted() -> None:
    first, second = run_world(2, ids_and_empty_rows, timeout=60)
    assert first[0] == [[0, 0, 1, 1], [-1, 2, 0], []]
    assert second[0] == [[2, 2, 3, 3], [], [-1, 2, 0]]
    assert first[1] == [7, 3, 1] and second[1] == [7, 3, 0]
    assert [len(each[2]) for each in (first, second)] == [2, 2]  # the agreement, and one all-gather
    assert first[3:] == second[3:] == (7, 3.0)
