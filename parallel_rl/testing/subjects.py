"""Inputs of `check_law`, and the processes in which it runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from parallel_rl.hosts.function_loss import FunctionLoss, LossCallable
from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.registry import get_loss, registered_name
from parallel_rl.testing.alone import Alone, check_alone
from parallel_rl.testing.batches import Sizes
from parallel_rl.testing.cases import EVERY_AXIS, Batch, Case, Subject, Trial
from parallel_rl.testing.layouts import Layout, Rank
from parallel_rl.testing.pool import run_world
from parallel_rl.testing.step import Outcome, RunLayout, attempt, check_world, run_layout

Loss = str | type[LossFn] | LossFn | Subject | LossCallable  # inputs of `check_law`


@dataclass(frozen=True, eq=False)
class Given:
    """A loss instance with its options and state, copied for each layout."""

    loss: LossFn

    @property
    def name(self) -> str:
        return registered_name(type(self.loss))

    @property
    def axes(self) -> frozenset[str]:
        return EVERY_AXIS

    def build(
        self, *, vocab_size: int | None = None, cp_layout: CPLayout = "zigzag", consume_logits: bool = False
    ) -> LossFn:
        loss = copy.copy(self.loss)
        loss.options = replace(
            loss.options, vocab_size=vocab_size, vocab_start=None, cp_layout=cp_layout, consume_logits=consume_logits
        )
        return loss


def subject_of(loss: Loss) -> Subject:
    """Make a subject of a user's loss; ValueError for an unknown name or anything else.

    >>> subject_of("nll").name
    'nll'
    """
    if isinstance(loss, str):
        return Case(get_loss(loss))
    if isinstance(loss, type) and issubclass(loss, LossFn):
        return Case(loss)
    if isinstance(loss, LossFn):
        return Given(loss)
    if all(hasattr(loss, name) for name in ("build", "name", "axes")):
        return loss  # type: ignore[return-value]
    if callable(loss) and not isinstance(loss, type):
        return FunctionLoss(loss)
    raise ValueError(
        f"{loss!r} is not a loss: give a registered name, a subclass of LossFn or an instance of one, or a function with the "
        "call of LossFn"
    )


def sizes_of(subject: Subject, layouts: Sequence[Layout]) -> Sizes:
    """Choose sizes that all these layouts can cut, with an even vocabulary if shards must be equal."""
    rows = math.lcm(12, *(2 * layout.dp * layout.micro_batches for layout in layouts))
    width = math.lcm(16, *(2 * layout.cp for layout in layouts))
    tensor = math.lcm(*(layout.tp for layout in layouts)) if layouts else 1
    vocab = 24 if tensor <= 8 else 3 * tensor
    return Sizes(rows, width, vocab - 1 if "padded vocabulary" in subject.axes else math.lcm(24, tensor))


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
