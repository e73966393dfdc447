"""Group-relative advantages (GRPO), by explicit group id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GroupAdvantageConfig:
    """How the rewards of one prompt's samples become advantages.

    Attributes:
        normalize: "std" divides by the group's standard deviation (GRPO, arXiv 2402.03300); "none" only subtracts the mean
            (Dr. GRPO, arXiv 2503.20783).
        singleton: what a group of one gets: "zero", its own "reward", or an "error".
        eps: added to the standard deviation.
    """

    normalize: Literal["std", "none"] = "std"
    singleton: Literal["zero", "reward", "error"] = "error"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise ValueError(f"eps = {self.eps} must be at least 0")


def group_relative_advantages(rewards: Tensor, group_ids: Tensor, config: GroupAdvantageConfig | None = None) -> Tensor:
    """How much better than its group each sample did: A_i = (r_i − mean_g) / (std_g + eps).

    mean_g and std_g (unbiased, two passes, in float64) are over the samples with the same id. A group whose rewards are all
    equal gets exactly 0, whatever rounding its mean suffers.

    Args:
        rewards: [N] floats.
        group_ids: [N] integers, in any order; a group must be whole on the rank that calls.
        config: see `GroupAdvantageConfig`.

    Returns:
        [N] in the dtype of `rewards`.

    Raises:
        ValueError: wrong shapes or dtypes, a reward that is not finite, a group of one where `singleton` is "error".
    """
    config = config or GroupAdvantageConfig()
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be floats [N], got {rewards.dtype} {list(rewards.shape)}")
    if group_ids.shape != rewards.shape or group_ids.is_floating_point():
        raise ValueError(
            f"group_ids must be integers {list(rewards.shape)}, got {group_ids.dtype} {list(group_ids.shape)}"
        )
    if not bool(rewards.isfinite().all()):
        where = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"rewards[{where}] = {rewards[where].item()} is not finite")
    names, group, count = group_ids.unique(return_inverse=True, return_counts=True)
    alone = count == 1
    if config.singleton == "error" and bool(alone.any()):
        raise ValueError(
            f"group {int(names[alone][0])} has one sample; set singleton to 'zero' or 'reward', or sample more"
        )
    value = rewards.double()
    sums = torch.zeros(len(names), dtype=torch.float64, device=rewards.device)
    centred = value - (sums.index_add(0, group, value) / count)[group]
    if config.normalize == "std":
        variance = sums.index_add(0, group, centred.square()) / (count - 1).clamp(min=1)
        scaled = centred / (variance.sqrt() + config.eps)[group]
    else:
        scaled = centred
    low = torch.full_like(sums, torch.inf).scatter_reduce(0, group, value, "amin")
    high = torch.full_like(sums, -torch.inf).scatter_reduce(0, group, value, "amax")
    advantages = torch.where((low == high)[group], 0.0, scaled)
    if config.singleton == "reward":
        advantages = torch.where(alone[group], value, advantages)
    return advantages.to(rewards.dtype)
