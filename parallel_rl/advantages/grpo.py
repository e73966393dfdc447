"""Group-relative advantages (GRPO) as one number a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.advantages.estimate import estimate
from parallel_rl.advantages.grouped import GRPO

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.groups import ParallelGroups


def group_relative_advantages(
    rewards: Tensor, group_ids: Tensor, config: GRPO | None = None, groups: ParallelGroups | None = None
) -> Tensor:
    """How much better than its group each sample did: A_i = (r_i − mean_g) / (std_g + eps); see `GRPO`, `estimate`.

    Args:
        rewards: [N] floats.
        group_ids: [N] integers, in any order; a group may be spread over data ranks.
        config: see `GRPO`.
        groups: the data ranks; None is one process.

    Returns:
        [N] in the dtype of `rewards`.

    Raises:
        ValueError: wrong shapes or dtypes, a reward that is not finite, a group of one where `singleton` is "error".
    """
    batch = {
        "rewards": rewards,
        "group_ids": group_ids,
        "token_mask": torch.ones((*rewards.shape[:1], 1), dtype=torch.bool, device=rewards.device),
    }
    return estimate(config or GRPO(), batch, groups).advantages[:, 0].to(rewards.dtype)
