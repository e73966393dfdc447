"""Shaping of raw rewards: scale, running mean and deviation, length, stop, clip, KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.advantages.base import moments
from parallel_rl.advantages.returns import terminal_rewards
from parallel_rl.advantages.table import SampleTable
from parallel_rl.config.strict import Variants

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RewardScale:
    """Clamp rewards to [source_min, source_max], mapped to [target_min, target_max]."""

    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    def __post_init__(self) -> None:
        for side in ("source", "target"):
            low, high = getattr(self, f"{side}_min"), getattr(self, f"{side}_max")
            if not low < high:
                raise ValueError(f"{side}_min = {low} must be below {side}_max = {high}")

    def __call__(self, rewards: Tensor) -> Tensor:
        part = (rewards.clamp(self.source_min, self.source_max) - self.source_min) / (self.source_max - self.source_min)
        return self.target_min + part * (self.target_max - self.target_min)


class Overlong(Variants):
    """Base of rules for too long responses: (rewards [N], lengths [N], truncated [N]) -> [N]."""

    def __call__(self, rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        """Return [N] rewards, given the response lengths in tokens and which were cut off."""
        raise NotImplementedError


@dataclass(frozen=True)
class SoftOverlong(Overlong, name="dapo"):
    """r + factor·clamp((max_length − buffer − n)/buffer, −1, 0) (DAPO, arXiv 2503.14476).

    Attributes:
        max_length: largest number of tokens of a response.
        buffer: the penalty grows from 0 over the last `buffer` tokens before `max_length`.
        factor: the penalty at `max_length`.
        bounded: False lets the penalty grow beyond `max_length` (LightRFT, verl, NeMo-RL).
    """

    max_length: int
    buffer: int
    factor: float = 1.0
    bounded: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.buffer <= self.max_length:
            raise ValueError(f"buffer = {self.buffer} must lie in [1, max_length = {self.max_length}]")
        if self.factor < 0:
            raise ValueError(f"factor = {self.factor} must be at least 0")

    def __call__(self, rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        over = (self.max_length - self.buffer - lengths.double()) / self.buffer
        return rewards + self.factor * over.clamp(-1.0 if self.bounded else None, 0.0)


@dataclass(frozen=True)
class StopProperly(Overlong, name="stop_properly"):
    """Multiply a truncated response's reward by a coefficient, or replace it by a negative one (ProRL).

    coefficient: in [0, 1] the factor; below 0 the new reward.
    """

    coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not self.coefficient <= 1:
            raise ValueError(f"coefficient = {self.coefficient} must be at most 1")

    def __call__(self, rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        changed = rewards * self.coefficient if self.coefficient >= 0 else torch.full_like(rewards, self.coefficient)
        return torch.where(truncated.bool(), changed, rewards)


@dataclass(frozen=True, kw_only=True)
class RewardShaping:
    """Options of reward shaping, applied from top to bottom; see `shape_rewards`.

    Attributes:
        reward_scale: clip and map raw rewards.
        overlong: rule for rewards of long or truncated responses.
        running_norm: divide by the standard deviation of all rewards of the run so far, including this step's.
        running_minus_mean: subtract their mean first.
        reward_clip: bounds of the rewards.
    """

    reward_scale: RewardScale | None = None
    overlong: Overlong | None = None
    running_norm: bool = False
    running_minus_mean: bool = False
    reward_clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.running_minus_mean and not self.running_norm:
            raise ValueError(
                "running_minus_mean = True has no effect with running_norm = False; set it, or leave this out"
            )
        if self.reward_clip is not None and not self.reward_clip[0] < self.reward_clip[1]:
            raise ValueError(f"reward_clip = {list(self.reward_clip)} must be two numbers, the smaller first")


def clip_filter_like_weight(rewards: Tensor, clip: float = 3.0, lamda: float = 1.0) -> Tensor:
    """Return weights [P, n]: min(P/P', clip) of the P' prompts with unequal rewards, `lamda` for others.

    >>> clip_filter_like_weight(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tensor([[2., 2.],
            [1., 1.]])

    Args:
        rewards: [P, n], one prompt a row.
        clip: the largest weight.
        lamda: the weight of rows with equal rewards; if all are equal, every weight is 1.

    Raises:
        ValueError: not [P, n] floats, or `clip` below 1.
    """
    if rewards.dim() != 2 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be floats [P, n], got {rewards.dtype} {list(rewards.shape)}")
    if not clip >= 1:
        raise ValueError(f"clip = {clip} must be at least 1")
    ids = torch.arange(len(rewards), device=rewards.device)[:, None].expand_as(rewards)
    table = SampleTable(rewards.flatten(), ids.flatten())
    return table.informative_weight(clip, lamda).view(rewards.shape).to(rewards.dtype)


def compute_reward(
    rewards: Tensor,
    kl_coefficient: float,
    kl: Tensor | Sequence[Tensor],
    action_mask: Tensor | None = None,
    *,
    num_actions: Sequence[int] | None = None,
    clip_range: tuple[float, float] | None = None,
) -> Tensor | list[Tensor]:
    """Compute token rewards: −c·kl_t, plus the sample's reward at its last token.

    >>> compute_reward(torch.tensor([1.0]), 0.5, torch.tensor([[0.0, 2.0, 4.0]]), torch.tensor([[0, 1, 1]]))
    tensor([[ 0., -1., -1.]])

    Args:
        rewards: [N], clipped to `clip_range` first.
        kl_coefficient: c; negative counts as 0.
        kl: [N, S] with `action_mask` [N, S] (a row without a valid token has its reward in the last column), or for packed
            sequences N tensors [n_i] with `num_actions` n_i.

    Returns:
        [N, S], 0 outside the mask except in those last columns; or N tensors [n_i].

    Raises:
        ValueError: padded `kl` without a mask, packed `kl` without `num_actions`, or numbers that do not fit.
    """
    value = rewards if clip_range is None else rewards.clamp(*clip_range)
    coefficient = max(kl_coefficient, 0.0)
    if isinstance(kl, Tensor):
        if action_mask is None or action_mask.shape != kl.shape or kl.dim() != 2 or len(value) != len(kl):
            got = None if action_mask is None else list(action_mask.shape)
            raise ValueError(
                f"kl [N, S] = {list(kl.shape)} needs an action_mask like it and rewards [N], got {got} and {list(value.shape)}"
            )
        mask = action_mask.bool()
        shaped = terminal_rewards(value, mask, kl, coefficient)
        empty = torch.where(mask.any(1), 0.0, value).to(shaped.dtype)
        return torch.cat([shaped[:, :-1], shaped[:, -1:] + empty[:, None]], 1)
    if num_actions is None or [len(part) for part in kl] != list(num_actions) or len(value) != len(kl):
        raise ValueError(
            f"kl of {[len(part) for part in kl]} tokens needs num_actions like it and as many rewards, got {num_actions} and "
            f"{len(value)}"
        )
    last = [torch.arange(len(part), device=part.device) == len(part) - 1 for part in kl]
    return [torch.where(at, value[i], 0.0) - coefficient * kl[i] for i, at in enumerate(last)]


class RunningMoments:
    """Moments of all rewards so far, of every data rank; updated once a step, alike on all ranks."""

    def __init__(self) -> None:
        self.count, self.mean, self._square = 0.0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Return the unbiased standard deviation; 0 for fewer than two rewards."""
        return math.sqrt(self._square / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, rewards: Tensor, mask: Tensor | None = None, group: ProcessGroup | None = None) -> None:
        """Update with this step's rewards [n] (where `mask` [n]); collective over `group`."""
        keep = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
        new = moments(rewards, keep, group)
        count, mean, square = torch.stack([new.number, new.mean, new.square]).tolist()
        total = self.count + count
        if count:
            away = mean - self.mean
            self._square += square + away * away * self.count * count / total
            self.mean += away * count / total
            self.count = total

    def normalize(self, rewards: Tensor, *, minus_mean: bool = False) -> Tensor:
        """Return rewards / std, or (rewards − mean) / std; undivided while the deviation is 0."""
        centred = rewards - self.mean if minus_mean else rewards
        return centred / self.std if self.std > 0 else centred

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "square": self._square}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint; ValueError for the state of something else."""
        if set(state) != {"count", "mean", "square"}:
            raise ValueError(f"the state has {sorted(state)}; running moments need count, mean and square")
        self.count, self.mean, self._square = (float(state[name]) for name in ("count", "mean", "square"))
