"""Group-relative advantages against the definition, one group at a time."""

from __future__ import annotations

import statistics

import pytest
import torch

from parallel_rl.advantages import estimate
from parallel_rl.advantages.grouped import GRPO
from parallel_rl.config.strict import configure


def scores(rewards: torch.Tensor, groups: torch.Tensor, config: GRPO | None = None) -> torch.Tensor:
    """[N] the advantages of samples of one token."""
    mask = torch.ones((*rewards.shape[:1], 1), dtype=torch.bool)
    batch = {"rewards": rewards, "group_ids": groups, "token_mask": mask}
    return estimate(config or GRPO(), batch).advantages[:, 0]


@pytest.mark.parametrize("normalize", ["std", "none"])
def test_against_the_definition_with_groups_in_any_order(normalize: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(40, generator=generator, dtype=torch.float64)
    groups = torch.randint(7, 12, (40,), generator=generator)
    config = configure(GRPO, {"normalize": normalize})
    advantages = scores(rewards, groups, config)
    for group in set(groups.tolist()):
        mine = (groups == group).nonzero()[:, 0].tolist()
        values = [float(rewards[i]) for i in mine]
        mean, std = statistics.fmean(values), statistics.stdev(values)
        for place, value in zip(mine, values, strict=True):
            expected = (value - mean) / (std + 1e-6 if normalize == "std" else 1)
            assert float(advantages[place]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("normalize", ["std", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_constant_group_gets_exactly_zero(normalize: str, dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0, 1e30, 1e30, 0.1, 3.0], dtype=dtype)
    groups = torch.tensor([1, 1, 1, 2, 3, 3, 1, 2])
    advantages = scores(rewards, groups, configure(GRPO, {"normalize": normalize}))
    assert advantages.dtype == torch.promote_types(dtype, torch.float32)
    assert advantages[groups != 2].tolist() == [0.0] * 6
    assert advantages[3] > 0 > advantages[7]


def test_singletons_by_choice() -> None:
    rewards, groups = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([5, 4, 4])
    zero = scores(rewards, groups, GRPO(singleton="zero", normalize="none"))
    assert zero.tolist() == [0.0, -1.0, 1.0]
    own = scores(rewards, groups, GRPO(singleton="reward", normalize="none"))
    assert own.tolist() == [2.0, -1.0, 1.0]
    with pytest.raises(ValueError, match="group 5 has one sample"):
        scores(rewards, groups)


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        (torch.tensor([1, 2]), torch.tensor([0, 0]), "rewards must be floats"),
        (torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64), "rewards must be floats"),
        (torch.ones(2), torch.zeros(3, dtype=torch.int64), "group_ids must be integers"),
        (torch.ones(2), torch.zeros(2), "group_ids must be integers"),
        (torch.tensor([1.0, float("nan")]), torch.zeros(2, dtype=torch.int64), r"rewards\[1\] = nan is not finite"),
    ],
)
def test_bad_input(rewards: torch.Tensor, groups: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scores(rewards, groups)
    with pytest.raises(ValueError, match="eps = -1"):
        GRPO(eps=-1)
