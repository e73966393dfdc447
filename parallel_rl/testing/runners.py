"""Ranks for a check: the pool's, or a running job's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from parallel_rl.testing.alone import Alone, check_alone
from parallel_rl.testing.cases import Batch, Subject, Trial
from parallel_rl.testing.layouts import Layout, Rank
from parallel_rl.testing.pool import run_world
from parallel_rl.testing.step import Outcome, RunLayout, attempt, check_world, run_layout


class Runner(Protocol):
    def alone(self, subject: Subject, batch: Batch) -> Alone:
        """Run the checks of one process."""

    def run(self, trial: Trial, layouts: Sequence[Layout], dtype: torch.dtype) -> list[list[Outcome]]:
        """Return all ranks' outcomes per layout; WorldError if a rank died or did not answer."""


@dataclass(frozen=True)
class PoolRunner:
    """Warm ranks of this machine's pool; `timeout` seconds per call."""

    timeout: float

    def alone(self, subject: Subject, batch: Batch) -> Alone:
        [result] = run_world(1, check_alone, subject, batch, timeout=self.timeout)
        return result

    def run(self, trial: Trial, layouts: Sequence[Layout], dtype: torch.dtype) -> list[list[Outcome]]:
        of_ranks = run_world(layouts[0].world, check_world, layouts, [trial], dtype, True, timeout=self.timeout)
        return [[entries[i][2] for entries in of_ranks] for i in range(len(layouts))]


@dataclass(frozen=True)
class JobRunner:
    """Ranks of torchrun's or srun's job, each of which calls the check."""

    place: Callable[[Layout], Rank]  # this rank's groups on a layout
    run_layout: RunLayout = run_layout

    def alone(self, subject: Subject, batch: Batch) -> Alone:
        """Run the checks of one process; an error on one rank is raised on all."""
        result = check_alone(0, subject, batch)
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, result.error)
        wrong = {text: errors.index(text) for text in errors if text}
        if wrong and not result.error:
            return Alone(None, "; ".join(f"rank {rank}: {text}" for text, rank in wrong.items()))
        return result

    def run(self, trial: Trial, layouts: Sequence[Layout], dtype: torch.dtype) -> list[list[Outcome]]:
        mine = [attempt(layout, trial, self.place(layout), dtype, self.run_layout) for layout in layouts]
        of_ranks: list[list[Outcome]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        return [of_places(outcomes) for outcomes in zip(*of_ranks, strict=True)]


def of_places(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Keep one outcome per place, errors first; pipeline stages share a place."""
    return list(
        {outcome.place: outcome for outcome in sorted(outcomes, key=lambda outcome: bool(outcome.error))}.values()
    )
