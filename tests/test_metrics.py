"""Group sums and metrics: any split gives the numbers of one process that holds everything."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import Metrics, ParallelGroups, count_valid, reduce_metrics
from parallel_rl.groups import group_sum
from parallel_rl.metrics import Metric
from parallel_rl.testing.layouts import make_groups
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.validation import validation
from tests.collectives import recorded
from tests.test_counts import EMPTY, FIRST, SECOND, counted

preload("parallel_rl.testing.layouts")


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# Metrics: what every rank and micro-batch holds, and what one process with all of it would say.

SHARE = [0.5, -1.25, 3.0, 0.0, 7.0, 1e-3, -2.0, 0.125, 1.0, 2.0, 4.0, 8.0]
LOW = [3.0, math.inf, -2.5, math.inf, 1.0, 9.0, math.inf, math.inf, 0.0, 5.0, 6.0, 7.0]  # inf: no valid token there
WHOLE = {  # the shares are exact in binary, so that any order of addition gives the same sum
    "share": math.fsum(SHARE),
    "count": float(sum(range(12))),
    "low": -2.5,
    "high": 2.5,
    "ratio": math.fsum(SHARE) / sum(range(12)),
    "nothing over nothing": 0.0,
    "nobody": math.inf,
}


def part(k: int) -> Metrics:
    """The metrics of the k-th of 12 micro-batches; their names in another order each time."""
    metrics = {
        "share": Metric("share", scalar(SHARE[k])),
        "count": Metric("count", torch.tensor(k)),
        "low": Metric("min", torch.tensor(LOW[k], dtype=torch.float32)),
        "high": Metric("max", scalar(-LOW[k])),
        "ratio": Metric("ratio", scalar(SHARE[k]), torch.tensor(k)),
        "nothing over nothing": Metric("ratio", scalar(0.0), scalar(0.0)),
        "nobody": Metric("min", scalar(math.inf)),
    }
    names = list(metrics)
    return Metrics({name: metrics[name] for name in names[k % 7 :] + names[: k % 7]})


def test_one_process_reduces_its_micro_batches() -> None:
    reduced = reduce_metrics([part(k) for k in range(12)])
    assert all(value.dtype == torch.float64 and value.dim() == 0 for value in reduced.values())
    assert {name: value.item() for name, value in reduced.items()} == pytest.approx(WHOLE, rel=1e-14)


def test_reading_a_metric() -> None:
    value = torch.tensor(2.0, requires_grad=True)
    metrics = Metrics({"a": Metric("share", value), "b": Metric("ratio", value, torch.tensor(4.0)), **part(0)._metrics})
    assert metrics["a"].item() == 2 and not metrics["a"].requires_grad
    assert metrics["b"].item() == 0.5 and metrics.parts("b").denominator.item() == 4  # type: ignore[union-attr]
    assert metrics["ratio"].item() == 0.0  # of this rank alone, whose denominator is 0
    assert len(metrics) == 9 and list(metrics)[:2] == ["a", "b"] and repr(metrics).startswith("Metrics(a: share ")
    with pytest.raises(KeyError):
        metrics["c"]


def test_metrics_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="at least one micro-batch, got an empty list"):
        reduce_metrics([])
    one, other = Metrics({"a": Metric("share", scalar(1))}), Metrics({"b": Metric("share", scalar(1))})
    for wrong, got in (
        (dict(one), "dict"),
        ([[one]], "a list with list"),
        (None, "NoneType"),
        ([dict(one)], "a list with dict"),
    ):
        with pytest.raises(ValueError, match=f"takes the Metrics of one call, or a list of them; got {got}"):
            reduce_metrics(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the same metrics: \['share b'\] against \['share a'\]"):
        reduce_metrics([one, other])
    with pytest.raises(ValueError, match="must report the same metrics"):
        reduce_metrics([one, Metrics({"a": Metric("max", scalar(1))})])


# Over real ranks.


class Reduced(NamedTuple):
    metrics: dict[str, float]
    ops: list[str]
    ops_without_data_context: list[str]
    counts: tuple[int, int]
    count_ops: list[str]
    rank_without_batches: tuple[int, int]
    fault: str


def reduce_on(rank: int, world: int, cp: int) -> Reduced:
    """Each rank has 12 / world of the parts; its micro-batches 1 or 2 of the masks, the same on context ranks."""
    groups, (_, _, dp_rank) = make_groups(rank, world, 1, cp)
    size = 12 // world
    mine = [part(k) for k in range(rank * size, (rank + 1) * size)]
    with recorded() as ops:
        reduced = reduce_metrics(mine, groups)
    with recorded() as more:
        again = reduce_metrics(mine, ParallelGroups(context=groups.context, data=groups.data))
    assert {name: value.item() for name, value in again.items()} == pytest.approx(
        {name: value.item() for name, value in reduced.items()}, rel=1e-14
    )
    batches = [[FIRST, EMPTY], [SECOND, SECOND]][dp_rank]
    with validation("never"), recorded() as count_ops:
        counts = count_valid(batches, groups.data)
    idle = count_valid(batches if dp_rank == 0 else [], groups.data)
    weighed = {**FIRST, "sample_mask": FIRST["sample_mask"] * 0.5}
    with pytest.raises(ValueError, match=r"sample_mask = 0.5 at \[0\] must be 0 or 1"):
        count_valid(batches if dp_rank == 0 else weighed, groups.data)
    fault = ""
    try:
        count_valid(batches if dp_rank == 0 else {"token_mask": FIRST["token_mask"]}, groups.data)
    except ValueError as error:
        fault = str(error)
    return Reduced(
        {name: value.item() for name, value in reduced.items()}, ops, more,
        (int(counts.seqs), int(counts.toks)), count_ops, (int(idle.seqs), int(idle.toks)), fault,
    )  # fmt: skip


@pytest.mark.parametrize(("world", "cp"), [(2, 1), (4, 2)])
def test_any_rank_gets_the_numbers_of_one_process(world: int, cp: int) -> None:
    results = run_world(world, reduce_on, world, cp, timeout=60)
    for got in results:
        assert got.metrics == results[0].metrics  # to the bit
        assert got.metrics == pytest.approx(WHOLE, rel=1e-14)
        assert got.ops == ["_allgather_base_"]
        assert got.ops_without_data_context == ["_allgather_base_"] * (2 if cp > 1 else 1)
        assert got.counts == counted([FIRST, EMPTY, SECOND, SECOND])
        assert got.count_ops == ["allreduce_ SUM"]
        assert got.rank_without_batches == counted([FIRST, EMPTY])
        assert got.fault.endswith(
            "data lacks the field 'sample_mask'; token_mask [B, S] and sample_mask [B] are counted"
        )


def long_names(k: int) -> Metrics:
    """More names than one collective of 4 KiB holds."""
    return Metrics(
        {f"a metric of a component with a long name, number {n}": Metric("max", scalar(k * n)) for n in range(90)}
    )


def without_a_micro_batch(rank: int, world: int, cp: int) -> tuple:
    """The first data rank has no micro-batch: what all ranks get, what a world without any says, and one that disagrees."""
    groups, (_, _, dp_rank) = make_groups(rank, world, 1, cp)
    apart = ParallelGroups(context=groups.context, data=groups.data)
    reduced, refused = [], []
    for where in (groups, apart):
        for made in (part, long_names):
            mine = [] if dp_rank == 0 else [made(rank), made(rank + world)]
            reduced.append({name: value.item() for name, value in reduce_metrics(mine, where).items()})
    for of_rank in ([], [Metrics({f"a{dp_rank}": Metric("share", scalar(1))})]):
        for where in (groups, apart):
            with pytest.raises(ValueError) as error:
                reduce_metrics(of_rank, where)
            refused.append(str(error.value))
    return reduced, refused


@pytest.mark.parametrize(("world", "cp"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_rank_without_a_micro_batch_gets_the_numbers_of_the_others(world: int, cp: int) -> None:
    """It raised, alone, while the others waited in their all-gather; it knows neither the names nor how many there are."""
    held = [k for rank in range(cp, world) for k in (rank, rank + world)]
    want = [{n: v.item() for n, v in reduce_metrics([made(k) for k in held]).items()} for made in (part, long_names)]
    for reduced, refused in run_world(world, without_a_micro_batch, world, cp, timeout=60):
        for got, expected in zip(reduced, want * 2, strict=True):
            assert got == pytest.approx(expected, rel=1e-14)
        assert all("got an empty list on every rank" in text for text in refused[:2])
        for text in refused[2:]:
            assert re.search(r"rank 0 of the group alone \['share a0'\], rank [12] alone \['share a1'\]$", text)


def sum_over(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    x = (torch.arange(6, dtype=torch.float64).view(2, 3) + 10 * rank).T.requires_grad_()  # not contiguous
    cotangent = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2) * (rank + 1) ** 2
    before = x.detach().clone()
    with recorded() as ops:
        y = group_sum(x, dist.group.WORLD)
        (gradient,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
    assert torch.equal(x.detach(), before) and group_sum(x, None) is x
    # every rank adds S², so the gradient is that of world · S²
    (of_square,) = torch.autograd.grad(group_sum(x, dist.group.WORLD).square().sum(), x)
    return y.detach(), gradient.detach(), of_square, ops


@pytest.mark.parametrize("world", [2, 4])
def test_a_group_sum_and_the_sum_of_its_cotangents(world: int) -> None:
    results = run_world(world, sum_over, world, timeout=60)
    value = sum((torch.arange(6).double().view(2, 3) + 10 * r).T for r in range(world))
    gradient = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2) * sum((r + 1) ** 2 for r in range(world))
    for y, grad, of_square, ops in results:
        assert torch.equal(y, results[0][0]) and torch.equal(grad, results[0][1])
        torch.testing.assert_close(y, value, rtol=1e-15, atol=0)
        torch.testing.assert_close(grad, gradient, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_square, 2 * value * world, rtol=1e-15, atol=0)
        assert ops == ["allreduce_ SUM"] * 2
