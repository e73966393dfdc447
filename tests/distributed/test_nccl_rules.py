"""Nothing goes to a collective that NCCL refuses: on a fake process group of 64 ranks, the meta device in place of a card.

No other test runs so many ranks, or tensors that are not the host's, through the losses' collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_rl import (
    LMHeadInput,
    ParallelGroups,
    SequencePackingLossWrapper,
    agreement,
    count_valid,
    metrics,
    reduce_metrics,
    statistics,
)
from parallel_rl.losses.core import run as counted
from parallel_rl.testing.cases import Case, has_scalar_head, step_statistics
from parallel_rl.testing.layouts import make_groups
from parallel_rl.validation import validation
from parallel_rl.vocab.linear.plan import LinearMode
from parallel_rl.vocab.sampling import sample_keys, sample_tokens
from tests.collectives import Refused
from tests.distributed.law import CORE, MORE, TRUNCATED
from tests.losses.test_no_sync import local_fields, make
from tests.watch import NO_ORDER, AnyOrder

RANK, TP, CP, WORLD = 37, 8, 2, 64
ROWS, WIDTH, COLUMNS, D = 4, 32, 3, 8


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    """TP 8 × CP 2 × DP 4, seen from a rank in the midst of all three."""
    if dist.is_initialized():
        pytest.skip("this process is in a world already")
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    try:
        yield make_groups(RANK, WORLD, TP, CP)[0]
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _meta_is_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank without tensors of its own puts on the card of an NCCL group; the fake group does not ask for one."""
    for module in (agreement, metrics, statistics, counted):
        monkeypatch.setattr(module, "communication_device", lambda group, home: torch.device("meta"))


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(2), "allreduce_ of a host tensor"),
        (torch.zeros(2, dtype=torch.bool, device="meta"), "allreduce_ of torch.bool"),
        (torch.zeros(3, 2, device="meta").T, "allreduce_ of strides (1, 2) for (2, 3)"),
    ],
    ids=["host", "bool", "strides"],
)
def test_what_nccl_refuses_is_seen(x: Tensor, said: str, groups: ParallelGroups) -> None:
    with Refused() as seen:
        dist.all_reduce(x, group=groups.tensor)
        dist.all_reduce(torch.zeros(2, device="meta"), group=groups.tensor)
    assert (seen.collectives, seen.refused) == (2, [said])


def run(
    case: Case,
    groups: ParallelGroups,
    packed: bool,
    output: Callable[[tuple[int, int]], Tensor | LMHeadInput],
    consume: bool = False,
) -> Refused:
    """One step of a loss: counts, statistics, forward, backward and metrics."""
    scalar = has_scalar_head(case.loss)
    shape = (1, ROWS * WIDTH // CP) if packed else (ROWS, WIDTH // CP)
    _, data = make(ROWS, WIDTH, 1 if scalar else COLUMNS, "meta")
    data["kept_ids"] = torch.zeros(ROWS, WIDTH, 3, dtype=torch.int64, device="meta")
    data["temperature"] = torch.ones(ROWS, device="meta")
    loss_fn = case.build(**({} if scalar else {"consume_logits": consume}))
    data |= local_fields(loss_fn, data, shape)
    bounds = torch.arange(0, ROWS * WIDTH + 1, WIDTH)
    call = SequencePackingLossWrapper(loss_fn, bounds) if packed else loss_fn
    with validation("auto"), AnyOrder(NO_ORDER) as order, Refused() as seen:
        counts = count_valid([data], groups.data)
        arguments = (output(shape), data, *counts, groups.tp_rank, groups.tensor, groups.context)
        loss, measured = call(*arguments, statistics=step_statistics([(call, arguments)], groups))
        loss.backward()
        if measured:
            reduce_metrics([measured], groups)
    assert order.seen == [], "refused under torch.use_deterministic_algorithms(True)"
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "packed"),
    [
        *(pytest.param(case, True, id=case.name) for case in (*CORE, *TRUNCATED)),
        *(pytest.param(case, True, id=case.name, marks=pytest.mark.slow) for case in MORE),
        *(pytest.param(case, False, id=f"{case.name}-padded", marks=pytest.mark.slow) for case in CORE[::2]),
    ],
)
def test_a_loss_on_logits(case: Case, packed: bool, groups: ParallelGroups) -> None:
    """Losses of each kind on padded rows too; recipes are further values of these options, which no collective depends on."""
    columns = 1 if has_scalar_head(case.loss) else COLUMNS

    def logits(shape: tuple[int, int]) -> Tensor:
        return torch.zeros(*shape, columns, dtype=torch.bfloat16, device="meta", requires_grad=True) * 1

    seen = run(case, groups, packed, logits, consume=packed)
    assert seen.refused == [] and seen.collectives >= 2


def head(shape: tuple[int, int], split: bool, mode: LinearMode) -> LMHeadInput:
    """Hidden states, this tensor rank's part of them under sequence parallelism, and its rows of the weight."""
    rows, width = shape
    hidden = torch.zeros(rows, width // TP if split else width, D, dtype=torch.bfloat16, device="meta")
    weight = torch.zeros(COLUMNS, D, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return LMHeadInput(hidden.requires_grad_() * 1, weight, sequence_parallel=split, mode=mode, budget=1 << 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "split"),
    [
        pytest.param(case, number % 2 == 0, id=case.name + (", packed, sequence parallel" if number % 2 == 0 else ""))
        for number, case in enumerate(case for case in CORE if case.build().requirements.reads in ("log-probs", "rows"))
    ],
)
def test_a_loss_on_hidden_states(case: Case, split: bool, groups: ParallelGroups) -> None:
    seen = run(case, groups, split, lambda shape: head(shape, split, "auto"))
    assert seen.refused == [] and seen.collectives >= 4


@pytest.mark.parametrize("split", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("mode", ["in_forward", "resident", "recompute"])
def test_each_mode_of_the_head(mode: LinearMode, split: bool, groups: ParallelGroups) -> None:
    case = Case("policy", {"ratio_level": "token" if mode == "in_forward" else "sequence-mean"})
    seen = run(case, groups, True, lambda shape: head(shape, split, mode))
    assert seen.refused == [] and seen.collectives >= 4


def test_draws(groups: ParallelGroups) -> None:
    z, ids = torch.zeros(6, COLUMNS, device="meta"), torch.zeros(6, dtype=torch.int64, device="meta")
    with Refused() as seen:
        sample_tokens(z, sample_keys(3, ids, ids), top_k=5, top_p=0.9, group=groups.tensor)
    assert seen.refused == [] and seen.collectives >= 3
