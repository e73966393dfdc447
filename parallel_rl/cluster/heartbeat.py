"""Progress of this rank: reported by the work itself, read by the watchdog and by error messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Progress:
    moves: int = 0
    doing: str = "starting up"
    saving: bool = False
    phase: str | None = None
    step: int = 0


_progress = _Progress()


def tick(doing: str, *, saving: bool = False) -> None:
    """Report that `doing` begins now; `saving` marks a write that a stop leaves time for."""
    _progress.moves += 1
    _progress.doing, _progress.saving = doing, saving


def enter_step(phase: str, step: int) -> None:
    """Report that step `step` of a phase, counted from 1, begins now."""
    _progress.phase, _progress.step = phase, step
    tick("the step's data")


def reset() -> None:
    _progress.phase, _progress.step = None, 0
    tick("starting up")


def moves() -> int:
    """Count the reports so far."""
    return _progress.moves


def doing() -> str:
    return _progress.doing


def saving() -> bool:
    """Return whether the last reported work is a save, which a stop leaves time for."""
    return _progress.saving


def step_name() -> str:
    """Name the step, as in "rl step 7"; empty before the first."""
    return "" if _progress.phase is None else f"{_progress.phase} step {_progress.step}"
