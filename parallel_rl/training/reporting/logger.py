"""The protocol of a logger, and their registry."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Row = Mapping[str, float | int | str]


class Logger(Protocol):
    """Takes what a run reports, on the first rank only; its methods may raise."""

    def log(self, phase: str, step: int, row: Row) -> None:
        """The metrics of a step; steps count from 1 in each phase. After a restart steps may come again."""

    def text(self, phase: str, step: int, title: str, text: str) -> None:
        """A text of several lines, such as samples of an evaluation; step 0 is before the first."""

    def close(self) -> None:
        """The run ends."""


@dataclass(frozen=True)
class RunInfo:
    """Facts that a logger is given at its creation.

    Attributes:
        folder: of the run.
        config: all of it, as plain values.
        done: steps per phase of the checkpoint that the run continues from; None for a new run.
    """

    folder: Path
    config: Mapping[str, object] = field(default_factory=dict)
    done: Mapping[str, int] | None = None

    def run_id(self, logger: str, make: Callable[[], str]) -> str:
        """The id that a logger gave this run when it began, or a new one: a run that goes on stays one run there, too."""
        path = self.folder / "loggers.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if self.done is None or logger not in known:
            known[logger] = make()
            path.write_text(json.dumps(known), encoding="utf-8")
        return str(known[logger])


@dataclass(frozen=True)
class Registered:
    """A logger's maker, and the package that it needs."""

    make: Callable[[RunInfo], Logger]
    package: str | None


_LOGGERS: dict[str, Registered] = {}


def register_logger(
    name: str, *, package: str | None = None
) -> Callable[[Callable[[RunInfo], Logger]], Callable[[RunInfo], Logger]]:
    """Decorator: makes a class or function from a run's `RunInfo` to a `Logger` known by a name for `run.loggers`.

    A module that does so is imported by `parallel-rl train --import MODULE`.

    >>> @register_logger("doc_lines")
    ... class Lines:
    ...     def __init__(self, info: RunInfo) -> None:
    ...         self.lines = [f"{len(info.config)} sections"]
    ...     def log(self, phase: str, step: int, row: Row) -> None:
    ...         self.lines.append(f"{phase} {step}: {row['loss']}")
    ...     def text(self, phase: str, step: int, title: str, text: str) -> None: ...
    ...     def close(self) -> None: ...
    >>> registered()["doc_lines"].make(RunInfo(Path("runs/one"), {"run": {}})).lines
    ['1 sections']

    Args:
        package: a module that must be installed for it.

    Raises:
        ValueError: the name is taken.
    """
    if name in _LOGGERS:
        raise ValueError(f"logger {name!r} is registered already")

    def register(make: Callable[[RunInfo], Logger]) -> Callable[[RunInfo], Logger]:
        _LOGGERS[name] = Registered(make, package)
        return make

    return register


def registered() -> Mapping[str, Registered]:
    """Every logger by its name."""
    return _LOGGERS
