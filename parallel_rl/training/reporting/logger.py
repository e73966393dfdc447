"""Protocol of a logger, and registry."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Row = Mapping[str, float | int | str]


class Logger(Protocol):
    """Receives a run's reports, on the first rank only; its methods may raise."""

    def log(self, phase: str, step: int, row: Row) -> None:
        """Log the metrics of a step, from 1 in each phase; after a restart steps may repeat."""

    def text(self, phase: str, step: int, title: str, text: str) -> None:
        """Log a text of several lines, such as samples of an evaluation; step 0 is before the first."""

    def close(self) -> None:
        """End the run's log."""


@dataclass(frozen=True)
class RunInfo:
    """Facts for a new logger; the config has plain values.

    `done` has the steps per phase of the checkpoint that the run resumes from; None for a new run.
    """

    folder: Path
    config: Mapping[str, object] = field(default_factory=dict)
    done: Mapping[str, int] | None = None

    def run_id(self, logger: str, make: Callable[[], str]) -> str:
        """Return a logger's id of this run, or make one; a resumed run keeps it."""
        path = self.folder / "loggers.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if self.done is None or logger not in known:
            known[logger] = make()
            path.write_text(json.dumps(known), encoding="utf-8")
        return str(known[logger])


@dataclass(frozen=True)
class Registered:
    """Factory of a logger, and the package it needs."""

    make: Callable[[RunInfo], Logger]
    package: str | None


_LOGGERS: dict[str, Registered] = {}


def register_logger(
    name: str, *, package: str | None = None
) -> Callable[[Callable[[RunInfo], Logger]], Callable[[RunInfo], Logger]]:
    """Register a maker of a `Logger` from a `RunInfo` by its name in `run.loggers`; a decorator.

    `parallel-rl train --import MODULE` imports the module that does so. `package` must be installed for it. ValueError for a
    name that is taken.

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
    """
    if name in _LOGGERS:
        raise ValueError(f"logger {name!r} is registered already")

    def register(make: Callable[[RunInfo], Logger]) -> Callable[[RunInfo], Logger]:
        _LOGGERS[name] = Registered(make, package)
        return make

    return register


def registered() -> Mapping[str, Registered]:
    return _LOGGERS
