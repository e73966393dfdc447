"""Groups spread over two ranks: the numbers of one process, and errors on both alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import ParallelGroups
from parallel_rl.advantages import AdvantageEstimator, estimate, moments, whiten
from parallel_rl.testing.pool import WorldError, run_world

CASES: list[dict] = [
    *({"name": name} for name in AdvantageEstimator.variants),
    {"name": "grpo", "normalize": "leave_one_out", "baseline": "leave_one_out"},
    {"name": "grpo", "normalize": "batch"},
    {"name": "rec", "drop": "balance", "normalize": "population", "seed": 3},
    {"name": "cpgd", "normalize": "clip_filter"},
    {"name": "rloo", "kl_coefficient": 0.1, "whiten": "unbiased", "clip_high": 1.0},
    {"name": "optimal_token_baseline", "handle_zero_tail": True, "importance_cap": 2.0, "kl_coefficient": 0.1},
    {"name": "gae", "gamma": 0.9, "lam": 0.8, "whiten": "center", "bootstrap": True},
]


def whole(count: int = 13) -> dict[str, Tensor]:
    """Groups that any split cuts, ids beyond what a float holds, holes, dropped samples with NaN."""
    generator = torch.Generator().manual_seed(1)
    data = {
        name: torch.randn(count, generator=generator, dtype=torch.float64) for name in ("rewards", "greedy_rewards")
    }
    data["bootstrap_values"] = torch.randn(count, generator=generator, dtype=torch.float64)
    data["reward_components"] = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    data["token_mask"] = torch.rand(count, 6, generator=generator) < 0.7
    data["group_ids"] = 2**62 + torch.arange(count) % 3
    data["sample_ids"] = torch.arange(count)
    data["run_ids"] = torch.tensor([5, 7, 9, 6, 1, 3, 5, 7, 9, 6, 1, 3, 5])  # two runs of each task
    data["step_ids"] = torch.arange(count, 0, -1)
    data["state_ids"] = 2**61 + torch.arange(count) % 4
    data["sample_mask"] = torch.arange(count) != 4
    data["rewards"][4] = torch.nan
    for name in ("kl", "values", "teacher_token_logprobs", "prev_logprobs", "generation_logprobs", "sum_pi_squared"):
        data[name] = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return data


def on_a_rank(rank: int, cuts: tuple[int, ...], change: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    groups = ParallelGroups(data=dist.group.WORLD)
    mine = slice(*cuts[rank : rank + 2])
    data = {name: x[mine] for name, x in {**whole(), **change}.items()}
    found = [tuple(estimate(case, data, groups)) for case in CASES]
    white = [whiten(data["values"], data["token_mask"], mode, dist.group.WORLD) for mode in ("population", "unbiased")]  # type: ignore[arg-type]
    return [*found, *((x, x) for x in white)]  # type: ignore[misc]


@pytest.mark.parametrize("cuts", [(0, 6, 13), (0, 1, 13), (0, 13, 13)])
def test_any_split_gives_the_numbers_of_one_process(cuts: tuple[int, ...]) -> None:
    data = whole()
    expected = [tuple(estimate(case, data)) for case in CASES]
    for mode in ("population", "unbiased"):
        white = whiten(data["values"], data["token_mask"], mode)  # type: ignore[arg-type]
        expected.append((white, white))
    ranks = run_world(2, on_a_rank, cuts, {})
    for case, (own, *parts) in zip([*CASES, {}, {}], zip(expected, *ranks, strict=True), strict=True):
        for k in range(2):
            joined = torch.cat([part[k] for part in parts])
            torch.testing.assert_close(joined, own[k], rtol=1e-12, atol=1e-12, msg=str(case))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.full((13,), torch.nan)}, r"rewards\[0\] = nan is not finite"),
        (
            {"rewards": torch.cat([torch.ones(12), torch.tensor([torch.inf])])},
            r"rank 1: rewards\[6\] = inf is not finite",
        ),
        ({"group_ids": torch.cat([torch.zeros(12, dtype=torch.int64), torch.tensor([77])])}, "group 77 has one sample"),
        ({"values": torch.ones(13)}, r"values must be floats \[N, S\]"),
    ],
)
def test_a_fault_on_one_rank_is_an_error_on_both(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(WorldError, match=message) as caught:
        run_world(2, on_a_rank, (0, 6, 13), change, timeout=60)
    assert not caught.value.silent and len(caught.value.errors) == 2
    assert len({text.replace("rank 0", "rank 1") for text in caught.value.errors.values()}) == 1


def empty_world(rank: int) -> None:
    none = {"rewards": torch.zeros(0), "group_ids": torch.zeros(0, dtype=torch.int64), "token_mask": torch.zeros(0, 3)}
    estimate("grpo", none, ParallelGroups(data=dist.group.WORLD))


def test_no_sample_on_any_rank() -> None:
    with pytest.raises(WorldError, match="there is no sample in the step") as caught:
        run_world(2, empty_world, timeout=60)
    assert len(caught.value.errors) == 2


def moments_of_a_rank(rank: int, x: Tensor) -> list[float]:
    """Numbers far from 0, where E[x²] − E[x]² would be rounding, and a rank without any."""
    mask = torch.full((len(x),), rank == 0)
    return [float(part) for part in moments(x, mask, dist.group.WORLD)]


def test_moments_of_far_numbers() -> None:
    x = 1e9 + torch.arange(4, dtype=torch.float64)
    for found in run_world(2, moments_of_a_rank, x):
        assert found == [4, 1e9 + 1.5, 5.0, 1e9, 1e9 + 3]
