"""Mean and deviation of the rewards of a whole run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from parallel_rl.advantages.moments import moments

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


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
