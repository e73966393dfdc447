"""Sums and samples of a step: joined over micro-batches and over ranks that hold different numbers of them."""

from __future__ import annotations

import math

import pytest
import torch

from parallel_rl import Statistics
from parallel_rl.testing.layouts import make_groups
from parallel_rl.testing.pool import preload, run_world

preload("parallel_rl.testing.layouts")


def part(*values: float) -> Statistics:
    samples = torch.tensor(values, dtype=torch.float32)
    return Statistics({"n": torch.tensor(len(values))}, {"x": samples, "twice": 2 * samples})


def test_micro_batches_join() -> None:
    joined = (part(1.0, math.nan) + part(3.0)).reduce()
    assert dict(joined) == {"n": 3}
    assert joined.samples["x"].nan_to_num(-1).tolist() == [1.0, -1.0, 3.0]
    assert joined.samples["twice"].dtype == torch.float64


def test_parts_of_different_losses_do_not_join() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        part(1.0) + Statistics({"n": torch.tensor(1)})


def reduce_on(rank: int, world: int, cp: int, joint: bool) -> tuple[float, list[float], list[float]]:
    groups, _ = make_groups(rank, world, 1, cp)
    if not joint:
        groups = type(groups)(tensor=groups.tensor, context=groups.context, data=groups.data)
    mine = part(*[10.0 * rank + i for i in range(rank + 1)]).reduce(groups)
    order = mine.samples["x"].isnan()
    return mine["n"].item(), mine.samples["x"][~order].tolist(), mine.samples["twice"][~order].tolist()


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(("world", "cp"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_join(world: int, cp: int, joint: bool) -> None:
    wanted = sorted(10.0 * rank + i for rank in range(world) for i in range(rank + 1))
    for n, x, twice in run_world(world, reduce_on, world, cp, joint, timeout=60):
        assert n == len(wanted)
        assert sorted(x) == wanted
        assert twice == [2 * value for value in x]


def without_a_micro_batch(rank: int, world: int, cp: int) -> tuple[list, str]:
    """The last data rank has nothing, then no rank has, then data ranks have statistics of different losses."""
    groups, (_, _, dp_rank) = make_groups(rank, world, 1, cp)
    apart = type(groups)(tensor=groups.tensor, context=groups.context, data=groups.data)
    full = Statistics(dict(part(1.0, 2.0)), part(1.0, 2.0).samples, {"id": torch.tensor([7, 8, 9])})
    got = []
    for where in (groups, apart):
        mine = (Statistics({}) if dp_rank else full).reduce(where)
        got.append((dict(mine), *({n: x.tolist() for n, x in part.items()} for part in (mine.samples, mine.records))))
        assert Statistics({}).reduce(where) == {}
    with pytest.raises(ValueError) as error:
        Statistics({f"of_rank_{dp_rank}": torch.tensor(1)}).reduce(groups)
    return got, str(error.value)


@pytest.mark.parametrize(("world", "cp"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_rank_without_a_micro_batch_gets_the_statistics_of_the_others(world: int, cp: int) -> None:
    """It has no object to reduce, and knows neither the names nor how many there are."""
    samples = [1.0, 2.0] * cp
    want = {"n": 2 * cp}, {"x": samples, "twice": [2 * x for x in samples]}, {"id": [7, 8, 9]}
    for got, refused in run_world(world, without_a_micro_batch, world, cp, timeout=60):
        assert got == [want, want]
        assert "alone ['sum of_rank_0'], rank" in refused
