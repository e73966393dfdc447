"""Check several losses, on ranks of this machine or of the job; show the reports as a table and as a page."""

from __future__ import annotations

import contextlib
import html as markup
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from shutil import get_terminal_size
from typing import NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parallel_rl.groups import current_device, job_backend, take_device
from parallel_rl.testing.alone import Alone
from parallel_rl.testing.cases import Batch, Subject, Trial
from parallel_rl.testing.check import WORLDS, Limits, by_world, check_subject, runs_on
from parallel_rl.testing.layouts import Layout, Rank, default_layouts, layouts, make_groups
from parallel_rl.testing.pool import MAX_WORLD, close
from parallel_rl.testing.report import Report, Row
from parallel_rl.testing.step import Outcome
from parallel_rl.testing.subjects import JobRunner, PoolRunner, Runner

_GRACE = 5.0  # seconds in which a collective's own timeout may say more


@dataclass(frozen=True)
class _Shown:
    """Runner that advances a progress bar."""

    runner: Runner
    bar: Progress

    def alone(self, subject: Subject, batch: Batch) -> Alone:
        return self.runner.alone(subject, batch)

    def run(self, trial: Trial, layouts: Sequence[Layout], dtype: torch.dtype) -> list[list[Outcome]]:
        self.bar.update(self.bar.task_ids[0], description=f"{trial.case.name[:30]} on {layouts[0].world} ranks")
        return self.runner.run(trial, layouts, dtype)


@dataclass(frozen=True)
class Way:
    """How a loss is run on ranks: alone on process groups, or inside megatron-core's schedule."""

    default: Callable[[int], list[Layout]]  # layouts of so many ranks of this machine
    of_job: Callable[[int], list[Layout]]  # layouts of so many ranks of a job
    pool: Callable[[float], Runner]  # ranks of this machine, with a limit in seconds
    in_job: Callable[[float], Runner]  # ranks of the running job


def find_way(through: str) -> Way:
    """Return the way "groups" or "megatron"; ValueError if megatron-core is not installed.

    >>> [layout.name for layout in find_way("groups").default(8)]
    ['tp2.cp2.dp2.packed+padding.mb3.zigzag']
    """
    if through == "groups":
        return Way(
            default_layouts, lambda world: layouts(world, 6), PoolRunner, lambda timeout: JobRunner(_places(timeout))
        )
    try:
        import parallel_rl.megatron  # noqa: F401  before megatron itself: it silences warnings about a missing GPU
        from parallel_rl.verify import schedule
    except ModuleNotFoundError as error:
        raise ValueError(f"--through megatron: {error}; pip install 'megatron-core>=0.15,<0.20' psutil") from None

    def in_job(timeout: float) -> JobRunner:
        return JobRunner(lambda layout: schedule.place(layout, timeout), schedule.run_layout)

    return Way(schedule.schedule_layouts, schedule.schedule_layouts, schedule.SchedulePool, in_job)


def on_this_machine(
    subjects: Sequence[Subject], chosen: Sequence[Layout] | None, limits: Limits, way: Way, show: bool = True
) -> list[Report]:
    """Check each loss on gloo ranks started here; `show` a bar, and a line as each loss ends.

    Raises:
        ValueError: a layout of more ranks than this machine starts, or that a loss cannot be run on.
    """
    plans = [_plan(subject, chosen, way) for subject in subjects]
    most = max(world for plan in plans for world in plan)
    if most > MAX_WORLD:
        raise ValueError(
            f"a layout of {most} ranks: this machine starts {MAX_WORLD} at most; run it under torchrun or srun for more"
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    terminal = sys.stdout.isatty()  # a bar would take lines off a pipe
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())  # a notebook sets FORCE_COLOR
    drawn = show and console.is_terminal
    reports: list[Report] = []
    try:
        with Progress(*columns, console=console, transient=True, disable=not drawn, redirect_stdout=terminal) as bar:
            bar.add_task("starting ranks", total=len(subjects))
            for subject, plan in zip(subjects, plans, strict=True):
                reports.append(check_subject(subject, plan, _Shown(way.pool(limits.timeout), bar), limits))
                if show:
                    show_ended(reports, len(subjects))
                bar.advance(bar.task_ids[0])
    finally:
        close()
    return reports


def show_ended(reports: Sequence[Report], total: int) -> None:
    """Print a line on the last of several losses."""
    last = reports[-1]
    if total > 1:
        print(f"{len(reports)}/{total} {last.name}: {last.verdict} ({last.seconds:.1f} s)", flush=True)


def _plan(subject: Subject, chosen: Sequence[Layout] | None, way: Way) -> dict[int, list[Layout]]:
    if chosen is None:
        return {world: [layout for layout in way.default(world) if runs_on(subject, layout)] for world in WORLDS}
    for layout in chosen:
        if not runs_on(subject, layout):
            raise ValueError(
                f"{subject.name} cannot be run on {layout.name}: it takes {', '.join(sorted(subject.axes)) or 'one process'}"
            )
    return by_world(chosen)


@dataclass(frozen=True)
class _Bounded:
    """Runner that ends this rank if a call does not return in time, since nothing else would."""

    runner: Runner
    seconds: float

    def alone(self, subject: Subject, batch: Batch) -> Alone:
        with self._limit(f"{subject.name} on one process"):
            return self.runner.alone(subject, batch)

    def run(self, trial: Trial, layouts: Sequence[Layout], dtype: torch.dtype) -> list[list[Outcome]]:
        with self._limit(f"{trial.case.name} on {layouts[0].world} ranks"):
            return self.runner.run(trial, layouts, dtype)

    @contextlib.contextmanager
    def _limit(self, what: str) -> Iterator[None]:
        text = f"{what} did not come back in {self.seconds:g} s"
        timer = threading.Timer(self.seconds + _GRACE, _end, (text,))
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:  # a rank is gone or hangs, and so may what closes the groups
            _end(f"{what}: {error}")
        finally:
            timer.cancel()


def _end(text: str) -> NoReturn:
    print(f"parallel-rl: error (rank {os.environ['RANK']}): {text}", file=sys.stderr, flush=True)
    os._exit(1)


def in_job(
    subjects: Sequence[Subject],
    chosen: Sequence[Layout] | None,
    limits: Limits,
    way: Way,
    show: Callable[[Sequence[Report]], None],
    lines: bool = True,
) -> list[Report]:
    """Check each loss on the ranks of torchrun's or srun's job, all of them on NCCL if there are GPUs.

    Rank 0 shows the reports before any rank returns: a launcher ends all ranks with the first that fails. With `lines` it
    prints a line as each loss ends.

    Raises:
        ValueError: a layout of another number of ranks than the job's; `job_backend` refuses this machine.
    """
    world = int(os.environ["WORLD_SIZE"])
    mine = way.of_job(world) if chosen is None else [layout for layout in chosen if layout.world == world]
    if not mine:
        fault = f"none of the layouts has {world} ranks" if chosen else "no default layout has so many; give --layouts"
        raise ValueError(f"the job has {world} ranks: {fault}")
    backend = job_backend()
    take_device()
    dist.init_process_group(backend, timeout=timedelta(seconds=limits.timeout))
    try:
        runner = _Bounded(way.in_job(limits.timeout), limits.timeout)
        plan = [[layout for layout in mine if runs_on(subject, layout)] for subject in subjects]
        reports: list[Report] = []
        for subject, of_this in zip(subjects, plan, strict=True):
            reports.append(check_subject(subject, {world: of_this}, runner, limits))
            if lines and dist.get_rank() == 0:
                show_ended(reports, len(subjects))
        if dist.get_rank() == 0:
            show(reports)
        dist.barrier()
        return reports
    finally:
        dist.destroy_process_group()


def _places(timeout: float) -> Callable[[Layout], Rank]:
    """Return a function that makes this rank's groups on a layout, once."""
    groups: dict[tuple[int, int], Rank] = {}

    def place(layout: Layout) -> Rank:
        key = layout.tp, layout.cp
        if key not in groups:
            parts = make_groups(dist.get_rank(), dist.get_world_size(), *key, timedelta(seconds=timeout))
            groups[key] = Rank(*parts, current_device())
        return groups[key]

    return place


_WIDTH = 110  # so that a name and a verdict stay on their line
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1b1b1b;background:#fff}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #ccc}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}.ok{color:#0a6b2b}.bad{color:#a3151a;font-weight:600}"
    "details{margin:.6rem 0}summary{cursor:pointer;font-weight:600}dt{font-weight:600}dd{margin:0 0 .6rem 1rem}"
)


def table(reports: Sequence[Report]) -> None:
    """Print a line for each layout, or for each of several losses, and the diagnoses."""
    console = Console(highlight=False, soft_wrap=True, width=max(get_terminal_size().columns, _WIDTH))
    several = len(reports) > 1
    lines = Table(box=None, pad_edge=False)
    lines.add_column(
        "loss" if several else "layout", overflow="fold"
    )  # a name with its options may be as wide as the screen
    for name in ("loss error", "gradient error", "metric error", "verdict"):
        lines.add_column(name, no_wrap=True, min_width=len(name))
    for report in reports:
        for row in [_worst(report)] if several else report.rows:
            verdict = "[green]ok[/]" if row.verdict == "ok" else f"[red]{row.verdict}[/]"
            where = f"{report.name} ({len(report.rows)} layouts)" if several else row.layout
            lines.add_row(where, *map(_number, (row.loss, row.gradient, row.metrics)), verdict)
    console.print(lines)
    for report in reports:
        if not report.ok:
            console.print()
            console.print(str(report), markup=False)
    broken = sum(not report.ok for report in reports)
    seconds = sum(report.seconds for report in reports)
    console.print(
        f"\n{len(reports) - broken} of {len(reports)} losses obey the law ({seconds:.0f} s)"
        + (f"; [red]{broken} break it[/]" if broken else "")
    )


def _worst(report: Report) -> Row:
    """Make the row of a loss: its largest errors and its verdict."""
    if not report.rows:
        return Row("", math.nan, math.nan, math.nan, report.verdict)
    loss, gradient, metrics = (
        max(values, key=lambda x: math.inf if math.isnan(x) else x)
        for values in zip(*((row.loss, row.gradient, row.metrics) for row in report.rows), strict=True)
    )
    return Row("", loss, gradient, metrics, report.verdict)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1e}"


def html(reports: Sequence[Report]) -> str:
    """Return the reports as a page without scripts, for keyboard and paper too."""
    body = [
        f"<h1>parallel-rl verify</h1><p>{sum(report.ok for report in reports)} of {len(reports)} losses obey the law.</p>"
    ]
    body += [_section(report) for report in reports]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>parallel-rl verify</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _section(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{markup.escape(row.layout)}</td>"
        + "".join(f'<td class="n">{_number(value)}</td>' for value in (row.loss, row.gradient, row.metrics))
        + f'<td class="{"ok" if row.verdict == "ok" else "bad"}">{markup.escape(row.verdict)}</td></tr>'
        for row in report.rows
    )
    entries = "".join(
        f"<dt>{markup.escape(finding.axis)}: {markup.escape(finding.fault.name)}</dt>"
        f"<dd>{markup.escape(finding.text)}<br>Fix: {markup.escape(finding.fault.fix)}.</dd>"
        for finding in report.findings
    )
    verdict = (
        f'<span class="{"ok" if report.ok else "bad"}">{"obeys the law" if report.ok else "breaks the law"}</span>'
    )
    head = "<tr><th>layout</th><th>loss error</th><th>gradient error</th><th>metric error</th><th>verdict</th></tr>"
    return (
        f"<details{'' if report.ok else ' open'}><summary>{markup.escape(report.name)}: {verdict}</summary>"
        f"{f'<dl>{entries}</dl>' if entries else ''}<table>{head}{rows}</table></details>"
    )
