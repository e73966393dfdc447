"""Coefficient of the KL to the reference: fixed, or adaptive with a target."""

from __future__ import annotations

import math
from collections.abc import Mapping

_STEP = 0.2  # largest reaction of an update, as a fraction of the target


class FixedKLController:
    """A constant coefficient; ValueError for a `value` that is negative or not finite."""

    def __init__(self, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ValueError(f"KL coefficient = {value} must be at least 0")
        self.value = value

    def update(self, current: float, n_steps: int) -> None:
        """Leave the value unchanged."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's `state`; ValueError for the state of something else."""
        self.value = _value(state)


class AdaptiveKLController(FixedKLController):
    """A coefficient that rises while the KL is above its target, else falls (arXiv 1909.08593).

        e = clip(current/target − 1, −0.2, 0.2)        value ← value·(1 + e·n_steps/horizon)

    Args:
        value: initial, above 0.
        target: of the KL, above 0.
        horizon: in the unit of `n_steps`, above 0; `n_steps` ≥ 5·horizon could flip the sign and is refused.
    """

    def __init__(self, value: float, target: float, horizon: float) -> None:
        super().__init__(value)
        for name, number in (("value", value), ("target", target), ("horizon", horizon)):
            if not 0 < number < math.inf:
                raise ValueError(f"{name} = {number} of an adaptive KL controller must be above 0")
        self.target, self.horizon = target, horizon

    def update(self, current: float, n_steps: int) -> None:
        """Update with the mean KL of `n_steps` samples; ValueError if not finite or above the horizon's bound."""
        if not math.isfinite(current):
            raise ValueError(f"the KL = {current} is not finite")
        if not 0 <= n_steps * _STEP < self.horizon:
            raise ValueError(f"n_steps = {n_steps} must be at least 0 and below 5 × horizon = {5 * self.horizon:g}")
        error = min(max(current / self.target - 1, -_STEP), _STEP)
        self.value *= 1 + error * n_steps / self.horizon


def kl_controller(value: float, target: float | None = None, horizon: float | None = None) -> FixedKLController:
    """Return an adaptive controller if there is a target (horizon 10000 by default), else a fixed one.

    >>> controller = kl_controller(0.1, target=0.05)
    >>> controller.update(current=0.2, n_steps=500)
    >>> round(controller.value, 6)
    0.101

    Raises:
        ValueError: a horizon without a target; what the controllers refuse.
    """
    if target is None and horizon is not None:
        raise ValueError(f"horizon = {horizon} has no effect without a target; set target or leave it out")
    return (
        FixedKLController(value)
        if target is None
        else AdaptiveKLController(value, target, 10000.0 if horizon is None else horizon)
    )


def _value(state: Mapping[str, float]) -> float:
    value = state.get("value")
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"the state {dict(state)} is not one of a KL controller; it needs a value of at least 0")
    return float(value)
