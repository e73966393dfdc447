"""Between logits and gradients nothing waits for the device, and the number of operators does not depend on the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.losses_case import GRPO, LOSSES, make_call, make_data, make_statistics
from parallel_rl import (
    LMHeadInput,
    ParallelGroups,
    SequencePackingLossWrapper,
    count_valid,
    get_loss,
    reduce_metrics,
)
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.registry import losses
from parallel_rl.testing.batches import REWARD_IDS, local_names
from parallel_rl.testing.cases import Case, has_scalar_head, step_statistics
from parallel_rl.validation import validation
from parallel_rl.vocab.linear.plan import LinearMode
from tests.distributed.law import CORE, MORE, one_of_each
from tests.watch import Watch

V, D = 24, 8
CASES = [*CORE, *MORE]


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        (lambda x: torch.tensor([0, 1], device=x.device), "tensor on a device"),
        (lambda x: x[torch.tensor([0, 1])], "index by places on another device"),
        (lambda x: x[[0, 1]], "index by a list"),
        (lambda x: torch.ones(3).to(x.device), "copy to another device"),
        (lambda x: x[x > 0], "index by a mask"),
        (lambda x: torch.where(x > 0, x, torch.tensor(1.0)), "where from the host"),
        (lambda x: x.copy_(torch.ones(3)), "copy_ from the host"),
        (lambda x: x.new_tensor([1.0, 0.0]), "new_tensor on a device"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave by counts on the device"),
        (lambda x: x.long().bincount(), "bincount"),
        (lambda x: x.unique(), "_unique2"),
    ],
)
def test_a_wait_is_seen(waits: Callable[[Tensor], object], said: str) -> None:
    watch = Watch()
    with watch, contextlib.suppress(RuntimeError, NotImplementedError):  # a mask has no values here
        waits(torch.ones(3, device="meta"))
    assert watch.syncs == [said]


def make(rows: int, width: int, columns: int, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    data = {
        "input_ids": torch.zeros(rows, width, dtype=torch.int64, device=device),
        "token_mask": torch.ones(rows, width, device=device),
        "sample_mask": torch.ones(rows, device=device),
        "rewards": torch.ones(rows, device=device),
    }
    for name in (
        "advantages",
        "prev_logprobs",
        "generation_logprobs",
        "reference_policy_logprobs",
        "returns",
        "values",
        "teacher_token_logprobs",
    ):
        data[name] = torch.full((rows, width), -1.5, device=device)
    data["preference_labels"] = torch.arange(rows, device=device).float() % 3 - 1
    data["preference_margins"] = torch.ones(rows, device=device)
    data["sample_ids"] = torch.arange(rows, device=device)
    data["reward_labels"] = torch.full((rows, width), REWARD_IDS[0], device=device)
    data["group_ids"] = data["run_ids"] = torch.arange(rows, device=device)
    data["segment_ids"] = torch.zeros(rows, width, dtype=torch.int64, device=device)
    data["feedback_mask"] = data["sample_ids"] > 0
    data["expert_mask"] = torch.arange(rows, device=device) % 2 == 0
    data["token_weights"] = torch.full((rows, width), 0.5, device=device)
    data["observation_mask"] = torch.arange(width, device=device).expand(rows, width) % 3 == 0
    data["teacher_logits"] = torch.zeros(rows, width, columns, device=device)
    data["teacher_topk_logits"] = torch.zeros(rows, width, 3, device=device)
    data["teacher_topk_indices"] = torch.arange(3, device=device).expand(rows, width, 3)
    data["teacher_logsumexp"] = torch.full((rows, width), 3.0, device=device)
    return torch.zeros(rows, width, columns, device=device, requires_grad=True), data


def local_fields(loss_fn: LossFn, data: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The fields that come in the order of the logits, cut to their leading shape."""
    return {name: data[name].flatten(0, 1)[: shape[0] * shape[1]].unflatten(0, shape) for name in local_names(loss_fn)}


def step(
    loss_fn: LossFn,
    logits: Tensor,
    data: dict[str, Tensor],
    packed: bool,
    groups: ParallelGroups | None = None,
    *,
    head: Callable[[Tensor], LMHeadInput] | None = None,
) -> None:
    """Of the logits, or of hidden states in their place that `head` makes the loss's input of."""
    groups = groups or ParallelGroups()
    rows, width = data["input_ids"].shape
    call, counts = loss_fn, count_valid(data)
    if packed:
        bounds = torch.arange(0, rows * width + 1, width, device=logits.device)
        call, logits = SequencePackingLossWrapper(loss_fn, bounds), logits.view(1, -1, logits.shape[-1])  # type: ignore[assignment]
        data = {**data, **local_fields(loss_fn, data, (1, rows * width))}
    arguments = (logits if head is None else head(logits), data, *counts, None, groups.tensor, groups.context)
    loss, metrics = call(*arguments, statistics=step_statistics([(call, arguments)], groups))
    loss.backward()
    reduce_metrics([metrics], groups)


@pytest.mark.parametrize(
    ("case", "packed"),
    [
        *(pytest.param(case, True, id=case.name, marks=() if case in CORE else pytest.mark.slow) for case in CASES),
        *(pytest.param(case, False, id=f"{case.name}-padded", marks=pytest.mark.slow) for case in CORE),
    ],
)
def test_nothing_reads_a_value(case: Case, packed: bool) -> None:
    """On the meta device there are no values: whatever needs one fails."""
    scalar = has_scalar_head(case.loss)
    loss_fn = get_loss(case.loss)(case.config, **({} if scalar else {"backend": "eager"}))
    logits, data = make(4, 8, 1 if scalar else V, "meta")
    watch = Watch()
    with validation("auto"), watch:
        step(loss_fn, logits, data, packed)
    assert watch.syncs == []


def from_hidden_states(loss_fn: LossFn, dtype: torch.dtype, packed: bool, mode: LinearMode = "auto") -> None:
    _, data = make(4, 8, V, "meta")
    hidden, weight = (
        torch.zeros(shape, dtype=dtype, device="meta", requires_grad=True) for shape in ((4, 8, D), (V, D))
    )
    watch = Watch()
    with validation("auto"), watch:
        step(loss_fn, hidden, data, packed, head=lambda x: LMHeadInput(x, weight, mode=mode, budget=1 << 12, rows=28))
    assert watch.syncs == [] and hidden.grad is not None and weight.grad is not None


@pytest.mark.parametrize(
    "case",
    [case for case in CORE if case.build().requirements.reads in ("log-probs", "rows")],
    ids=lambda case: case.name,
)
def test_nothing_reads_a_value_from_hidden_states(case: Case) -> None:
    from_hidden_states(get_loss(case.loss)(case.config), torch.bfloat16, packed=True)


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [
        pytest.param(dtype, packed, marks=() if packed == (dtype != torch.float32) else pytest.mark.slow)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for packed in (False, True)
    ],
)
@pytest.mark.parametrize("mode", ["in_forward", "resident", "recompute"])
def test_no_mode_of_the_head_reads_a_value(mode: LinearMode, dtype: torch.dtype, packed: bool) -> None:
    level = "token" if mode == "in_forward" else "sequence-mean"
    loss_fn = get_loss("policy")({**GRPO, "ratio_level": level})
    if (mode, dtype) == ("in_forward", torch.float16):
        with pytest.raises(ValueError, match="is incompatible with float16"):
            from_hidden_states(loss_fn, dtype, packed, mode)
    else:
        from_hidden_states(loss_fn, dtype, packed, mode)


@pytest.mark.parametrize(("dtype", "consume"), [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.9}, {"kept_sets": True}], ids=str)
def test_nothing_reads_a_value_of_a_truncated_policy(truncation: dict, dtype: torch.dtype, consume: bool) -> None:
    logits, data = make(4, 8, V, "meta")
    data["kept_ids"] = torch.zeros(4, 8, 3, dtype=torch.int64, device="meta")
    loss_fn = get_loss("policy")(GRPO, consume_logits=consume, **truncation)
    watch = Watch()
    with validation("auto"), watch:
        step(loss_fn, logits.to(dtype), data, packed=True)
    assert watch.syncs == []


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_bounds_of_packed_rows_are_not_waited_for(where: str) -> None:
    """From the host they are copied while it goes on; on the device nothing of them is read. As the counts of the step."""
    logits, data = make(4, 8, V, "meta")
    bounds = torch.arange(0, 33, 8, device=where)
    loss_fn = SequencePackingLossWrapper(get_loss("clipped_pg")({}, backend="eager"), bounds, bounds.clone())
    counts = torch.tensor(4, device=where), torch.tensor(28, device=where)
    watch = Watch()
    with validation("never" if where == "cpu" else "auto"), watch:  # a look at the host's own values is no wait
        loss, _ = loss_fn(logits.view(1, 32, V), data, *counts)
        loss.backward()
    assert watch.syncs == []


@pytest.mark.parametrize("name", sorted(name for name in losses() if not name.startswith("doc_")))
def test_operators_do_not_grow_with_the_number_of_sequences(name: str) -> None:
    counts, config = [], next(case.config for case in CASES if case.loss == name)
    for rows in (2, 16):
        logits, data = make(rows, 64 // rows, 1 if has_scalar_head(name) else V, "cpu")
        watch = Watch()
        with validation("never"), watch:
            step(get_loss(name)(config), logits, data, packed=True)
        counts.append(watch.operators)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("name", "most"), [("GRPO", 178), ("GSPO", 196), ("ClippedPG, importance sampling", 226)])
def test_a_policy_loss_is_few_operators_beyond_its_statistics(name: str, most: int) -> None:
    """Each is a launch on a card, or the time of one: its fields, sums and metrics are stacked."""
    data, counts = make_data(64, V, 4), []
    for call in (make_call(LOSSES[name](), data, V), make_statistics(data, V)):
        watch = Watch()
        with validation("never"), watch:
            call()
        counts.append(watch.operators)
    assert counts[0] - counts[1] <= most


def collectives(case: Case, groups: ParallelGroups) -> list[tuple[list[str], list[str]]]:
    """Of a loss on TP 2 x CP 2, for 2 and for 8 packed sequences."""
    found = []
    for rows in (2, 8):
        logits, data = make(rows, 64 // rows, 1 if has_scalar_head(case.loss) else V // 2, "cpu")
        bounds = torch.arange(0, 65, 64 // rows)
        loss_fn = SequencePackingLossWrapper(get_loss(case.loss)(case.config), bounds)
        local = torch.zeros(1, 32, logits.shape[-1], requires_grad=True)
        data |= local_fields(loss_fn.loss_fn, data, (1, 32))
        arguments = (local, data, *count_valid(data), groups.tp_rank, groups.tensor, groups.context)
        statistics = step_statistics([(loss_fn, arguments)], groups)
        forward, backward = Watch(), Watch()
        with validation("never"):
            with forward:
                loss, _ = loss_fn(*arguments, statistics=statistics)
            with backward:
                loss.backward()
        found.append((forward.collectives, backward.collectives))
    return found


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    """TP 2 × CP 2, seen from the first rank: what is called does not depend on what the other ranks answer."""
    if dist.is_initialized():
        pytest.skip("this process is in a world already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield ParallelGroups(tensor=dist.new_group([0, 1]), context=dist.new_group([0, 2]))
    finally:
        dist.destroy_process_group()


TOKEN_LOSSES = ("nll", "value", "reference_kl", "test_entropy", "test_class")


def _gathers(case: Case) -> int:
    """All-gathers over tensor ranks: the token statistics' one; of a PRM on the whole vocabulary two more, of each place's
    likeliest token, and of one on reward tokens none, their columns come by an all-reduce."""
    if case.loss == "prm":
        return 0 if "reward_token_ids" in case.config else 3
    if case.loss == "distillation":  # inside the top-k the student's columns come by an all-reduce
        return int("zero_outside_topk" in case.config or "bucket_tail" in case.config)
    if case.loss == "full_distillation":  # the normalisers of both sides, then the sums
        return 2
    if case.loss == "components":  # one read for all log-probs, and those of a divergence over the vocabulary
        return 1 + 2 * ("whole" in case.config["components"])
    return 0 if has_scalar_head(case.loss) else 1


@pytest.mark.parametrize("case", one_of_each(CASES), ids=lambda case: case.name)
def test_collectives_are_few_and_constant(case: Case, groups: ParallelGroups) -> None:
    """One all-gather for the statistics; one all-reduce a sequence quantity, and one more backward where it has a gradient."""
    few, many = collectives(case, groups)
    assert few == many, "2 and 8 sequences"
    forward, backward = few
    assert forward.count("_allgather_base_") == _gathers(case)
    by_sequence = forward.count("allreduce_")
    if case.loss in (*TOKEN_LOSSES, "kto", "simpo", "cpo", "orpo") or (
        case.config == {} and case.loss != "test_pair"  # it sums twice
    ):
        assert by_sequence == (case.loss not in (*TOKEN_LOSSES, "clipped_pg"))
    assert by_sequence <= 3 and len(backward) <= 1
    assert set(forward) <= {"_allgather_base_", "allreduce_"} and set(backward) <= {"allreduce_"}
