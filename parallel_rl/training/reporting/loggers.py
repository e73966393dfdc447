"""Loggers of a run; a failing one costs a warning, never the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from parallel_rl.config.names import is_left, not_registered
from parallel_rl.training.reporting.logger import Logger, Row, RunInfo, registered
from parallel_rl.training.reporting.trackers import NAMES


def check_loggers(names: Sequence[str]) -> None:
    """Refuse loggers that could not be made.

    Raises:
        ValueError: an unknown name (with the nearest), a duplicate, or a package that is not installed.
    """
    known = registered()
    for place, name in enumerate(names):
        if name not in known and not is_left("logger", name):
            raise ValueError(not_registered("logger", name, known, "register_logger"))
        if name in names[:place]:
            raise ValueError(f"logger {name!r} is named twice")
        package = known[name].package if name in known else None
        if package is not None and find_spec(package) is None:
            raise ValueError(
                f"logger {name!r} needs the package {package}, which is not installed: pip install {package}"
            )


class Loggers:
    """Loggers of a run. A logger's failure is reported once; it keeps receiving rows."""

    def __init__(self, names: Sequence[str] | None, info: RunInfo, warn: Callable[[str], None]) -> None:
        """Make the loggers of these names; None is TensorBoard, if installed."""
        self._warn, self._warned, self._made = warn, set[str](), dict[str, Logger]()
        if names is None:
            names = NAMES[:1] if find_spec(NAMES[0]) else ()
        for name in names:
            self._try(name, lambda name=name: self._made.update({name: registered()[name].make(info)}))  # type: ignore[misc]

    def log(self, phase: str, step: int, row: Row) -> None:
        for name, logger in self._made.items():
            self._try(name, lambda logger=logger: logger.log(phase, step, row))  # type: ignore[misc]

    def text(self, phase: str, step: int, title: str, text: str) -> None:
        for name, logger in self._made.items():
            self._try(name, lambda logger=logger: logger.text(phase, step, title, text))  # type: ignore[misc]

    def close(self) -> None:
        for name, logger in self._made.items():
            self._try(name, logger.close)

    def _try(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except (Exception, SystemExit) as error:
            if name not in self._warned:
                self._warned.add(name)
                what = f"{type(error).__name__}: {error}".splitlines()[0]
                self._warn(f"warning: the logger {name!r} failed, the run goes on (said once): {what}")
