"""Running moments of the rewards, over steps and over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel_rl.experience import RunningMoments
from parallel_rl.testing.pool import run_world


def steps() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [1e6 + torch.randn(n, generator=generator, dtype=torch.float64) for n in (5, 1, 8, 2)]


def test_against_all_rewards_at_once() -> None:
    moments, seen = RunningMoments(), torch.zeros(0, dtype=torch.float64)
    for step in steps():
        moments.update(torch.cat([step, torch.tensor([torch.nan])]), torch.arange(len(step) + 1) < len(step))
        seen = torch.cat([seen, step])
        assert moments.count == len(seen) and moments.mean == pytest.approx(float(seen.mean()), rel=1e-14)
        assert moments.std == pytest.approx(float(seen.std()), rel=1e-8)
    x = steps()[0]
    torch.testing.assert_close(
        moments.normalize(x, minus_mean=True), (x - seen.mean()) / seen.std(), rtol=1e-6, atol=1e-9
    )
    torch.testing.assert_close(moments.normalize(x), x / seen.std(), rtol=1e-8, atol=0)


def test_one_reward_and_equal_rewards_divide_nothing() -> None:  # Q27 of the specification: NaN at one
    moments = RunningMoments()
    moments.update(torch.tensor([3.0]))
    assert moments.std == 0 and moments.normalize(torch.tensor([3.0])).tolist() == [3]
    moments.update(torch.tensor([3.0, 3.0]))
    assert moments.std == 0 and moments.normalize(torch.tensor([3.0]), minus_mean=True).tolist() == [0]
    moments.update(torch.zeros(0))
    assert moments.count == 3


def test_the_state_goes_on() -> None:
    whole, half, other = RunningMoments(), RunningMoments(), RunningMoments()
    for step in steps():
        whole.update(step)
    for step in steps()[:2]:
        half.update(step)
    other.load_state_dict(half.state_dict())
    for step in steps()[2:]:
        other.update(step)
    assert other.state_dict() == whole.state_dict()
    with pytest.raises(ValueError, match="running moments need count, mean and square"):
        other.load_state_dict({"count": 1.0})


def on_a_rank(rank: int) -> list[dict[str, float]]:
    moments, states = RunningMoments(), []
    for step in steps():
        moments.update(step[: len(step) // 3] if rank == 0 else step[len(step) // 3 :], None, dist.group.WORLD)
        states.append(moments.state_dict())
    return states


def test_ranks_agree_on_the_moments_of_all() -> None:
    moments = RunningMoments()
    first, second = run_world(2, on_a_rank)
    assert first == second
    for step, state in zip(steps(), first, strict=True):
        moments.update(step)
        assert state == pytest.approx(moments.state_dict(), rel=1e-9)
