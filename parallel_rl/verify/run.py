"""The check of several losses, on ranks of this machine or of the job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from parallel_rl.testing.alone import Alone
from parallel_rl.testing.cases import Batch, Subject, Trial
from parallel_rl.testing.check import WORLDS, Limits, by_world, check_subject, layouts_of, runs_on
from parallel_rl.testing.layouts import Layout, Rank, layouts, make_groups
from parallel_rl.testing.pool import MAX_WORLD, close
from parallel_rl.testing.report import Report
from parallel_rl.testing.runners import JobRunner, PoolRunner, Runner
from parallel_rl.testing.sharded import Outcome


@dataclass(frozen=True)
class _Shown:
    """A runner that moves a progress bar on."""

    runner: Runner
    bar: Progress

    def alone(self, subject: Subject, batch: Batch) -> Alone:
        return self.runner.alone(subject, batch)

    def run(self, trial: Trial, layouts: Sequence[Layout], dtype: torch.dtype) -> list[list[Outcome]]:
        self.bar.update(self.bar.task_ids[0], description=f"{trial.case.name[:30]} on {layouts[0].world} ranks")
        return self.runner.run(trial, layouts, dtype)


def on_this_machine(
    subjects: Sequence[Subject], chosen: Sequence[Layout] | None, limits: Limits, show: bool = True
) -> list[Report]:
    """Check each loss on gloo ranks that are started here and ended again.

    Raises:
        ValueError: a layout of more ranks than this machine starts, or that a loss cannot be run on.
    """
    plans = [_plan(subject, chosen) for subject in subjects]
    most = max(world for plan in plans for world in plan)
    if most > MAX_WORLD:
        raise ValueError(
            f"a layout of {most} ranks: this machine starts {MAX_WORLD} at most; run it under torchrun or srun for more"
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    reports = []
    try:
        with Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
            bar.add_task("starting ranks", total=len(subjects))
            for subject, plan in zip(subjects, plans, strict=True):
                reports.append(check_subject(subject, plan, _Shown(PoolRunner(limits.timeout), bar), limits))
                bar.advance(bar.task_ids[0])
    finally:
        close()
    return reports


def _plan(subject: Subject, chosen: Sequence[Layout] | None) -> dict[int, list[Layout]]:
    if chosen is None:
        return layouts_of(WORLDS, subject)
    for layout in chosen:
        if not runs_on(subject, layout):
            raise ValueError(
                f"{subject.name} cannot be run on {layout.name}: it takes {', '.join(sorted(subject.axes)) or 'one process'}"
            )
    return by_world(chosen)


def in_job(subjects: Sequence[Subject], chosen: Sequence[Layout] | None, limits: Limits) -> list[Report]:
    """Check each loss on the ranks of torchrun's or srun's job, all of them on NCCL where there are GPUs.

    Raises:
        ValueError: a layout of another number of ranks than the job's.
    """
    world = int(os.environ["WORLD_SIZE"])
    mine = layouts(world, 6) if chosen is None else [one for one in chosen if one.world == world]
    if not mine:
        asked = f"none of the layouts has {world} ranks" if chosen else "no default layout has so many; give --layouts"
        raise ValueError(f"the job has {world} ranks: {asked}")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=limits.timeout))
    groups: dict[tuple[int, int], Rank] = {}

    def place(layout: Layout) -> Rank:
        key = layout.tp, layout.cp
        if key not in groups:
            groups[key] = Rank(*make_groups(dist.get_rank(), world, *key), device)
        return groups[key]

    try:
        plan = [[one for one in mine if runs_on(subject, one)] for subject in subjects]
        return [
            check_subject(subject, {world: of_this}, JobRunner(place), limits)
            for subject, of_this in zip(subjects, plan, strict=True)
        ]
    finally:
        dist.destroy_process_group()
