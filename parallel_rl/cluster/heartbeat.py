"""What this rank is at: told by the work itself, read by the hang watch and by the messages of errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Progress:
    moves: int = 0
    doing: str = "starting up"
    phase: str | None = None
    step: int = 0


_progress = _Progress()


def tick(doing: str) -> None:
    """Something moved: `doing` begins now."""
    _progress.moves += 1
    _progress.doing = doing


def enter_step(phase: str, step: int) -> None:
    """Step `step` of a phase, counted from 1, begins now."""
    _progress.phase, _progress.step = phase, step
    tick("the step's data")


def reset() -> None:
    """A run begins."""
    _progress.phase, _progress.step = None, 0
    tick("starting up")


def moves() -> int:
    """How often something moved."""
    return _progress.moves


def doing() -> str:
    """What began last."""
    return _progress.doing


def step_name() -> str:
    """The step, as in "rl step 7"; empty before the first."""
    return "" if _progress.phase is None else f"{_progress.phase} step {_progress.step}"
