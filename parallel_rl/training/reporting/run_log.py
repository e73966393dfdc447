"""Display and record of a run: progress bar, table, metrics.jsonl, loggers, and a picture of its curves."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from parallel_rl.cluster.progress import ranges
from parallel_rl.training.reporting.loggers import Loggers, Row, RunInfo

# heading, metric, format
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward", ".3f"),
    ("held-out", "held_out_reward", ".3f"),
    ("accuracy", "accuracy", ".3f"),
    ("loss", "loss", ".5f"),
    ("KL", "kl_penalty", ".5f"),
    ("entropy", "entropy", ".3f"),
    ("clip low", "clip_fraction_low", ".4f"),
    ("clip high", "clip_fraction_high", ".4f"),
    ("grad norm", "grad_norm", ".4f"),
    ("tokens/s", "tokens_per_second", ".0f"),
)
_LEAST_INFORMATIVE = ("clip low", "clip high", "entropy", "tokens/s", "grad norm", "KL", "accuracy", "held-out")
_SHOWN = {
    "rl": ("reward", "held-out", "loss", "KL", "entropy", "clip low", "clip high", "grad norm", "tokens/s"),
    "preference": ("held-out", "accuracy", "loss", "grad norm", "tokens/s"),
    "sft": ("held-out", "loss", "grad norm", "tokens/s"),
    "distillation": ("held-out", "loss", "grad norm", "tokens/s"),
}


class RunLog:
    """Rows of metrics to the screen and to the run's folder; inactive on every rank but the first.

    Use as a context manager. A row is written before the next step starts, so that a killed run keeps its metrics.
    """

    def __init__(
        self,
        folder: Path,
        objective: str,
        *,
        active: bool,
        after: Mapping[str, int] | None,
        config: Mapping[str, object] | None = None,
        loggers: Sequence[str] | None = None,
    ) -> None:
        """Open the log of a run; `loggers` are registered names, None is TensorBoard, if installed.

        `after` has the steps per phase of the checkpoint to resume from (later rows are dropped); None is a new run.
        """
        self.active = active
        self.objective = objective
        self._bar: Progress | None = None
        self._heading = ""
        self._steps, self._first, self._began = 0, 0, time.monotonic()  # of the phase
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept, self._found = ([], "") if after is None else _kept(self.path, after)
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        # a buffer would keep what a full disk refused, and write it later
        self._file = self.path.open("ab", buffering=0)
        # rich's guess fails in a notebook, which sets FORCE_COLOR and shows every frame of a bar
        terminal = sys.stdout.isatty()
        self.console = Console(highlight=False, force_terminal=terminal, width=None if terminal else 160)
        self._loggers = Loggers(loggers, RunInfo(folder, config or {}, after), self.say)

    def __enter__(self) -> RunLog:
        if self.active and self._found:
            self.say(f"{self.path}: {self._found}")
        if self.active and self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.active:
            return
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        self._loggers.close()

    def sync(self) -> None:
        """Sync the rows to the disk, before a checkpoint that relies on them; OSError if the disk refuses."""
        if self.active:
            os.fsync(self._file.fileno())

    def say(self, text: str) -> None:
        if self.active:
            self.console.print(text, markup=False, soft_wrap=True)

    def text(self, phase: str, step: int, title: str, text: str) -> None:
        """Show a text of several lines, and pass it to the loggers; step 0 is before the first."""
        if self.active:
            self.say(text)
            self._heading = ""  # repeats the table's headings
            self._loggers.text(phase, step, title, text)

    def phase(self, name: str, steps: int, done: int) -> None:
        """Begin a phase of `steps` steps after `done` of them."""
        self._heading = ""
        self._steps, self._first, self._began = steps, done, time.monotonic()
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(name, total=steps, completed=done)

    def step(self, phase: str, step: int, row: Row) -> None:
        """Write one step's row, whole or not at all: an OSError leaves no part of it.

        RuntimeError if a later start of the run owns metrics.jsonl.
        """
        if not self.active:
            return
        # Slurm may start a job elsewhere while a lost node still runs
        if not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
            raise RuntimeError(f"another start of this run has taken over {self.path}; this one ends")
        full_row = {"phase": phase, "step": step, **row}
        _append(self._file, (json.dumps(full_row) + "\n").encode())
        self._loggers.log(phase, step, row)
        self._print(phase, step, row)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    @property
    def files(self) -> tuple[str, ...]:
        """List the run log's files in the run's folder."""
        if not self.active:
            return ()
        return (
            "metrics.jsonl",
            *(f"{name}/" for name in ("tensorboard", "wandb") if (self.path.parent / name).is_dir()),
        )

    def _print(self, phase: str, step: int, row: Row) -> None:
        shown = _SHOWN["sft" if phase == "warmup" else self.objective]
        # only the held-out reward is missing in some rows
        columns = [
            (title, key, style)
            for title, key, style in _COLUMNS
            if title in shown and (key in row or title == "held-out")
        ]
        columns = _fitting(columns, self.console.width - max(11, len(phase) + 5) - 11)
        of_all = f"{step}/{self._steps}" if self._steps else f"{step}"
        heading = "  ".join([f"{phase:>6} step", *(f"{title:>9}" for title, _, _ in columns), "     left"])
        if heading != self._heading:
            self._heading = heading
            self.say(heading)
        cells = [f"{of_all:>{max(len(phase) + 5, 11)}}"]
        for _, name, style in columns:
            cells.append(f"{row[name]:>9{style}}" if name in row else " " * 8 + "·")
        a_step = (time.monotonic() - self._began) / max(step - self._first, 1)
        minutes, seconds = divmod(round(a_step * max(self._steps - step, 0)), 60)
        cells.append(f"{minutes // 60:>3}:{minutes % 60:02}:{seconds:02}")
        self.say("  ".join(cells))


def _fitting(columns: Sequence[tuple[str, str, str]], width: int) -> list[tuple[str, str, str]]:
    """Choose the columns that fit `width` characters; the least informative are left out."""
    fitting = list(columns)
    for title in _LEAST_INFORMATIVE:
        if len(fitting) * 11 <= width:
            break
        fitting = [column for column in fitting if column[0] != title]
    return fitting


def write_whole(path: Path, text: str) -> None:
    """Replace a file by a text atomically; OSError if it could not be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _append(file: FileIO, line: bytes) -> None:
    before, rest = os.fstat(file.fileno()).st_size, memoryview(line)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(before)
        raise


def read_metrics(path: Path) -> list[dict[str, float | int | str]]:
    """Read the rows of a metrics.jsonl, without a truncated last line; ValueError names another bad line."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict[str, float | int | str]], bool]:
    """Read the rows, and whether a kill, or a power cut with trailing zeros, truncated the last line."""
    text = path.read_bytes() if path.is_file() else b""
    content = text.rstrip(b"\0\n")
    zeros = b"\0" in text[len(content) :]
    *lines, rest = (content + b"\n" if text[len(content) :].startswith(b"\n") else content).split(b"\n")
    rows: list[dict[str, float | int | str]] = []
    for number, line in enumerate([*lines, rest] if rest else lines, start=1):
        try:
            row = json.loads(line)
            if not (isinstance(row["phase"], str) and isinstance(row["step"], int)):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            if number > len(lines):
                return rows, True
            raise ValueError(
                f"{path.absolute()}, line {number} is not a row of metrics: {line[:60]!r}. Nothing was changed; correct or "
                "remove the line, or move the file away"
            ) from None
        rows.append(row)
    return rows, zeros


def _kept(path: Path, after: Mapping[str, int]) -> tuple[list[dict[str, float | int | str]], str]:
    """Keep the row of each step up to `after`, and remark on truncated, dropped and missing ones."""
    rows, cut_off = _read(path)
    by_step = {(str(row["phase"]), int(row["step"])): row for row in rows}
    kept = {key: row for key, row in by_step.items() if key[1] <= after.get(key[0], 0)}
    dropped = [key for key in by_step if key not in kept]
    missing = [
        (phase, step) for phase, last in after.items() for step in range(1, last + 1) if (phase, step) not in kept
    ]
    remarks = ["the last line was cut off"] if cut_off else []
    for what, keys in (("dropped, as they come after the checkpoint", dropped), ("missing", missing)):
        for phase in dict.fromkeys(phase for phase, _ in keys):
            steps = ranges([step for name, step in keys if name == phase])
            remarks.append(f"the rows of {phase} step {steps} are {what}")
    return list(kept.values()), "; ".join(remarks)


_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward", "held_out_reward")),
    ("accuracy", ("accuracy",)),
    ("loss", ("loss",)),
    ("KL to the reference", ("kl_penalty",)),
    ("entropy", ("entropy",)),
    ("gradient norm", ("grad_norm",)),
)


def draw_curves(rows: Sequence[Row], path: Path, title: str, held_out_before: float | None = None) -> bool:
    """Draw the main phase's curves into a PNG, atomically; `held_out_before` is the reward at step 0.

    Returns False, writing nothing, without matplotlib or data. OSError if it could not be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [row for row in rows if row["phase"] != "warmup"]
    panels = [(name, keys) for name, keys in _PANELS if any(key in row for row in rows for key in keys)][:4]
    if not panels:
        return False
    columns = min(2, len(panels))
    figure = Figure(figsize=(4.2 * columns, 2.9 * -(-len(panels) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flatten()
    for unused in grid[len(panels) :]:
        unused.set_visible(False)
    for axes, (name, keys) in zip(grid, panels, strict=False):
        for key in keys:
            points = [(int(row["step"]), float(row[key])) for row in rows if key in row]
            if key == "held_out_reward" and held_out_before is not None:
                points.insert(0, (0, held_out_before))
            if points:
                marker = "o" if key == "held_out_reward" else ""
                axes.plot(*zip(*points, strict=True), label=key.replace("_", " "), marker=marker, linewidth=1.4)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if name == "reward":
            axes.legend(loc="best")
    figure.suptitle(title)
    partial = path.with_suffix(".partial.png")
    try:
        figure.savefig(partial, dpi=130)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return True
