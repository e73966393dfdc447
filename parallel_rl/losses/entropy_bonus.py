"""Coefficients that change over the steps: by a schedule, or towards a target entropy."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from parallel_rl.config.strict import Variants, positive


@dataclass(frozen=True)
class CoefficientScheduleConfig:
    """A schedule: a line from `start` to `peak`, then a cosine to `valley`, where it stays.

    c(s) = start + s/W·(peak − start) for s < W;  valley + (peak − valley)·½·(1 + cos(π·(s − W)/D)) for s < W + D;  then valley

    start: c at step 0. peak: c at step W. valley: c from step W + D on. warmup_steps: W. decay_steps: D.
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


class EntropyBonus(Variants):
    """Option of the policy loss, in place of a number: how the entropy bonus's coefficient changes."""

    @abstractmethod
    def start_coefficient(self) -> EntropyCoefficient:
        """Return the coefficient before the first step."""


class EntropyCoefficient:
    """Coefficient of the current optimizer step, by default constant.

    >>> coefficient = EntropyCoefficient.of(AdaptiveEntropyBonus(target=0.5, initial=0.01))
    >>> coefficient.value  # nothing is known of the entropy yet
    0.0
    >>> coefficient.step({"entropy": 0.3})
    >>> coefficient.value
    0.015
    """

    def __init__(self, value: float) -> None:
        self.value = value

    @classmethod
    def of(cls, option: float | EntropyBonus) -> EntropyCoefficient:
        return option.start_coefficient() if isinstance(option, EntropyBonus) else cls(option)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Advance by one optimizer step with its reduced metrics, equal on all ranks."""

    def state_dict(self) -> dict[str, float]:
        """Return the numbers that change over the steps, for a checkpoint; empty for a constant."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a `state_dict`; ValueError for the state of another kind of coefficient."""
        if set(state) != set(self.state_dict()):
            raise ValueError(f"the state of this entropy bonus has {sorted(self.state_dict())}, got {dict(state)}")


@dataclass(frozen=True)
class ScheduledEntropyBonus(EntropyBonus, CoefficientScheduleConfig, name="schedule"):
    """A coefficient on a line from `start` to `peak`, then on a cosine down to `valley`, where it stays.

    start: first coefficient. peak: coefficient after the warm-up. valley: last coefficient. decay_steps: optimizer steps from
        peak to valley.
    warmup_steps: optimizer steps from start to peak. With start = peak the coefficient is constant for these steps, with peak =
        valley = 0 it falls on a line to 0.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _not_negative(self, "peak", "valley", "start")

    def start_coefficient(self) -> EntropyCoefficient:
        return _Scheduled(self)


class _Scheduled(EntropyCoefficient):
    def __init__(self, config: ScheduledEntropyBonus) -> None:
        super().__init__(config.at(0))
        self.config, self.steps = config, 0

    def step(self, metrics: Mapping[str, float]) -> None:
        self._go_to(self.steps + 1)

    def state_dict(self) -> dict[str, float]:
        return {"entropy_bonus_steps": self.steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        super().load_state_dict(state)
        self._go_to(checked_steps(state["entropy_bonus_steps"]))

    def _go_to(self, step: int) -> None:
        self.steps, self.value = step, self.config.at(step)


@dataclass(frozen=True)
class AdaptiveEntropyBonus(EntropyBonus, name="adaptive"):
    """A coefficient that rises while the policy's entropy is too low, and is applied only then.

    After each optimizer step it moves by `delta` within [low, high]: up if the mean entropy of the step's valid tokens is at
    most `target`, otherwise down. The next step applies it if the entropy was at most the target, otherwise 0; the first step
    applies 0.

    target: mean entropy of a token, in nats. initial: first coefficient. delta: change per step. low: smallest
    coefficient. high: largest coefficient.

    Paper: arXiv 2505.22312 (Skywork-OR1).
    """

    target: float
    initial: float = 0.0
    delta: float = 0.005
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _not_negative(self, "low")
        for name in ("target", "delta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive and finite")
        if not self.low < self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        if not self.low <= self.initial <= self.high:
            raise ValueError(f"initial = {self.initial} must lie in [low, high] = [{self.low}, {self.high}]")

    def start_coefficient(self) -> EntropyCoefficient:
        return _Adaptive(self)


class _Adaptive(EntropyCoefficient):
    def __init__(self, config: AdaptiveEntropyBonus) -> None:
        super().__init__(0.0)
        self.config, self.coefficient = config, config.initial

    def step(self, metrics: Mapping[str, float]) -> None:
        if "entropy" not in metrics:
            raise ValueError(
                f"the adaptive entropy bonus reads the metric 'entropy', got {', '.join(metrics) or 'none'}"
            )
        config, is_low = self.config, metrics["entropy"] <= self.config.target
        moved = self.coefficient + (config.delta if is_low else -config.delta)
        self.coefficient = min(max(moved, config.low), config.high)
        self.value = self.coefficient if is_low else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"entropy_coefficient": self.coefficient, "entropy_coefficient_applied": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        super().load_state_dict(state)
        self.coefficient, self.value = state["entropy_coefficient"], state["entropy_coefficient_applied"]


def _not_negative(config: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{name} = {getattr(config, name)} must be at least 0 and finite")
