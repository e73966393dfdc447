"""The coefficient of the entropy bonus where it moves over the optimizer's steps: by a schedule, or led to a target."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from parallel_rl.config.strict import Variants


class EntropyBonus(Variants):
    """How the coefficient of an entropy bonus moves: an option of the policy loss, in place of a number."""

    @abstractmethod
    def start(self) -> EntropyCoefficient:
        """The coefficient before the first step."""


class EntropyCoefficient:
    """The coefficient of the present optimizer step; a number is one that stays.

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
        """A coefficient as the option of a loss says."""
        return option.start() if isinstance(option, EntropyBonus) else cls(option)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Move on by one optimizer step with these reduced metrics, equal on all ranks."""

    def state_dict(self) -> dict[str, float]:
        """What changes over the steps, for a checkpoint; empty where nothing does."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from where `state_dict` was taken.

        Raises:
            ValueError: a state of another kind of coefficient.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"the state of this entropy bonus has {sorted(self.state_dict())}, got {dict(state)}")


@dataclass(frozen=True)
class ScheduledEntropyBonus(EntropyBonus, name="schedule"):
    """A coefficient that stays at `initial`, then moves to `final` and stays there.

    initial, final: where it starts and ends. hold_steps: optimizer steps at `initial`. decay_steps: steps from there to
    `final`. shape: of the way between them, a line or half a cosine.
    """

    initial: float
    final: float
    decay_steps: int
    hold_steps: int = 0
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        _not_negative(self, "initial", "final", "hold_steps")
        if self.decay_steps < 1:
            raise ValueError(f"decay_steps = {self.decay_steps} must be at least 1")
        if self.initial == self.final:
            raise ValueError(
                f"initial = final = {self.final} is no schedule; give the number itself, entropy_bonus: {self.final}"
            )

    def at(self, step: int) -> float:
        """The coefficient of a step, counted from 0.

        >>> [ScheduledEntropyBonus(0.4, 0.0, decay_steps=4, hold_steps=1).at(step) for step in (0, 1, 3, 9)]
        [0.4, 0.4, 0.2, 0.0]
        """
        done = min(max(step - self.hold_steps, 0) / self.decay_steps, 1.0)
        left = 1 - done if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.final + (self.initial - self.final) * left

    def start(self) -> EntropyCoefficient:
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
        steps = state["entropy_bonus_steps"]
        if steps != int(steps) or steps < 0:
            raise ValueError(f"entropy_bonus_steps = {steps} must be a number of steps")
        self._go_to(int(steps))

    def _go_to(self, step: int) -> None:
        self.steps, self.value = step, self.config.at(step)


@dataclass(frozen=True)
class AdaptiveEntropyBonus(EntropyBonus, name="adaptive"):
    """A coefficient that rises while the policy's entropy is too low, and is applied only then.

    After each optimizer step, from the mean entropy of the step's valid tokens: up by `delta` where it is at most `target`,
    down otherwise, within [low, high]. The next step applies it if the entropy was at most the target, and 0 otherwise; the
    first applies 0.

    target: mean entropy of a token, in nats. initial: of the coefficient. delta: a step of it. low, high: its bounds.

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

    def start(self) -> EntropyCoefficient:
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
