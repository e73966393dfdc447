"""A coefficient with a schedule over the optimizer's steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallel_rl.config.strict import positive


@dataclass(frozen=True)
class CoefficientScheduleConfig:
    """A schedule: a line from `start` to `peak`, then a cosine to `valley`, where it stays.

    c(s) = start + s/W·(peak − start) for s < W;  valley + (peak − valley)·½·(1 + cos(π·(s − W)/D)) for s < W + D;  then valley

    peak, valley, start: values. warmup_steps: W. decay_steps: D.
    """

    peak: float
    valley: float
    warmup_steps: int = 0
    decay_steps: int = 0
    start: float = 0.0

    def __post_init__(self) -> None:
        for name in ("peak", "valley", "start"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)} must be a finite number")
        positive(self, "warmup_steps", "decay_steps", zero=True)
        if self.warmup_steps == self.decay_steps == 0:
            raise ValueError(
                "warmup_steps and decay_steps are both 0, which is not a schedule; give the coefficient as a number"
            )
        if self.start != 0 and self.warmup_steps == 0:
            raise ValueError(f"start = {self.start} has no effect without warmup_steps")

    def at(self, step: int) -> float:
        """Return the coefficient of a step, counted from 0.

        >>> [CoefficientScheduleConfig(0.8, 0.2, warmup_steps=4, decay_steps=10).at(step) for step in (0, 2, 9, 99)]
        [0.0, 0.4, 0.5, 0.2]
        """
        return scheduled(step, self.start, self.peak, self.valley, self.warmup_steps, self.decay_steps)


def scheduled(step: int, start: float, peak: float, valley: float, warmup_steps: int, decay_steps: int) -> float:
    if step < warmup_steps:
        return start + step / warmup_steps * (peak - start)
    after = step - warmup_steps
    if after >= decay_steps:
        return valley
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * after / decay_steps))


def checked_steps(steps: object) -> int:
    """Return a checkpoint's number of optimizer steps; ValueError unless it is a whole number ≥ 0."""
    if isinstance(steps, bool) or not isinstance(steps, (int, float)) or steps < 0 or steps != int(steps):
        raise ValueError(f"steps = {steps!r} must be a number of optimizer steps ≥ 0")
    return int(steps)
