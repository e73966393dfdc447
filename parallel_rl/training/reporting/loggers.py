"""Loggers of a run: protocol, registry, and TensorBoard, W&B, MLflow and trackio; a failing one costs a warning."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import yaml

from parallel_rl.config.names import is_left, not_registered

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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


NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
_PROJECT = "parallel_rl"


@register_logger("tensorboard", package="tensorboard")
class TensorBoard:
    """Events under tensorboard/ in the run's folder, one run per phase to recognise repeated steps."""

    def __init__(self, info: RunInfo) -> None:
        self._info, self._folder = info, info.folder / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}
        if info.done is not None:
            for phase in sorted(path.name for path in self._folder.glob("*") if path.is_dir()):
                self._writer(phase)  # from now on later events are ignored

    def log(self, phase: str, step: int, row: Row) -> None:
        writer = self._writer(phase)
        for name, value in _numbers(row).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def text(self, phase: str, step: int, title: str, text: str) -> None:
        self._writer(phase).add_text(title, _indented(text), step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, phase: str) -> SummaryWriter:
        if phase not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            done = self._info.done
            writer = SummaryWriter(
                str(self._folder / phase), purge_step=None if done is None else done.get(phase, 0) + 1
            )
            self._writers[phase] = writer
            if self._info.config:
                writer.add_text("config", _indented(yaml.safe_dump(dict(self._info.config), sort_keys=False)), 0)
        return self._writers[phase]


@register_logger("wandb", package="wandb")
class WandB:
    """A run of Weights & Biases, in the project WANDB_PROJECT or parallel_rl; one step axis per phase."""

    def __init__(self, info: RunInfo) -> None:
        import wandb

        self._html, self._phases = wandb.Html, set[str]()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", info.folder.name),
            dir=str(info.folder),
            config=dict(info.config),
            id=info.run_id("wandb", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
        )

    def log(self, phase: str, step: int, row: Row) -> None:
        self._send(phase, step, _numbers(row))

    def text(self, phase: str, step: int, title: str, text: str) -> None:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self._send(phase, step, {title: self._html(f"<pre>{escaped}</pre>")})

    def close(self) -> None:
        self._run.finish()

    def _send(self, phase: str, step: int, values: Mapping[str, object]) -> None:
        if phase not in self._phases:  # W&B's own step refuses repeated ones
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step", hidden=True)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log({f"{phase}/{name}": value for name, value in values.items()} | {f"{phase}/step": step})


@register_logger("mlflow", package="mlflow")
class MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME or parallel_rl."""

    def __init__(self, info: RunInfo) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        self._id = info.run_id("mlflow", lambda: self._begin(experiment, info))
        self._client.update_run(self._id, status="RUNNING")
        self._client.log_dict(self._id, dict(info.config), "config.yaml")

    def _begin(self, experiment: str, info: RunInfo) -> str:
        from mlflow.entities import Param

        run: str = self._client.create_run(experiment, run_name=info.folder.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in _flat(info.config)]  # they never change
        for first in range(0, len(params), 100):  # a request takes no more
            self._client.log_batch(run, params=params[first : first + 100])
        return run

    def log(self, phase: str, step: int, row: Row) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = [Metric(f"{phase}/{name}", value, now, step) for name, value in _numbers(row).items()]
        self._client.log_batch(self._id, metrics=values)

    def text(self, phase: str, step: int, title: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{phase}/{title}_{step:06d}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._id)


@register_logger("trackio", package="trackio")
class Trackio:
    """A run of trackio, in the project TRACKIO_PROJECT or parallel_rl."""

    def __init__(self, info: RunInfo) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=info.run_id("trackio", lambda: f"{info.folder.name}-{uuid.uuid4().hex[:6]}"),
            config=dict(info.config),
            resume="allow",
        )

    def log(self, phase: str, step: int, row: Row) -> None:
        self._trackio.log({f"{phase}/{name}": value for name, value in _numbers(row).items()} | {f"{phase}/step": step})

    def text(self, phase: str, step: int, title: str, text: str) -> None:
        self._trackio.log({f"{phase}/{title}": self._trackio.Markdown(_indented(text)), f"{phase}/step": step})

    def close(self) -> None:
        self._trackio.finish()


def _numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def _indented(text: str) -> str:
    """Format a text as a literal block of Markdown."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def check_loggers(names: Sequence[str]) -> None:
    """Raise ValueError for a logger that is unknown, named twice, or whose package is not installed."""
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
                self._warn(f"warning: the logger {name!r} failed; it warns once, and the run continues: {what}")
