"""Difference of a layout from one process."""

from __future__ import annotations

import math

from parallel_rl.testing.cases import Trial
from parallel_rl.testing.sharded import Outcome


def errors(trial: Trial, outcomes: list[Outcome]) -> tuple[float, float]:
    """Return relative errors of the loss and of the gradient's norm, from the ranks' outcomes of a layout."""
    first = [outcome for outcome in outcomes if outcome.place[0] == 0]
    want, truth = trial.want, sum(float(outcome.maps[1].sum()) for outcome in outcomes)
    gradient = math.sqrt(sum(outcome.squared_error for outcome in outcomes) / max(truth, 1e-300))
    return abs(sum(outcome.share for outcome in first) - want.loss) / abs(want.loss), gradient


def faults(trial: Trial, of_layout: dict[str, list[Outcome]], tolerance: float) -> list[str]:
    """List violations of the law over a world's layouts."""
    wrong, want = [], trial.want
    for layout, outcomes in of_layout.items():
        wrong += [outcome.stray for outcome in outcomes if outcome.stray]
        first = [outcome for outcome in outcomes if outcome.place[0] == 0]
        for outcome in outcomes:
            twin = next(other for other in first if other.place[1:] == outcome.place[1:])
            if (outcome.share, outcome.metrics) != (twin.share, twin.metrics):
                wrong.append(f"{layout}: tensor ranks differ: {outcome.share} and {twin.share}")
        loss, gradient = errors(trial, outcomes)
        if not loss <= tolerance:
            wrong.append(f"{layout}: loss off by {loss:.1e}")
        if not gradient <= tolerance:
            wrong.append(f"{layout}: gradient off by {gradient:.1e}")
        if set(outcomes[0].metrics) != set(want.metrics):
            wrong.append(f"{layout}: metrics {sorted(outcomes[0].metrics)} instead of {sorted(want.metrics)}")
        for name, value in want.metrics.items():
            got = outcomes[0].metrics.get(name, math.nan)
            if not (got == value or abs(got - value) <= tolerance * max(abs(value), 1e-2)):
                wrong.append(f"{layout}: {name} {got} instead of {value}")
    return wrong
