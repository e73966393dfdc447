"""One optimizer step's loss on one rank of a layout, with poison at places without loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.agreement import describe
from parallel_rl.testing.cases import Trial, empty_rows_on_purpose, reduced_numbers
from parallel_rl.testing.layouts import Layout, Piece, Rank, make_groups
from parallel_rl.testing.step import cut_step

_PATIENCE = 5.0  # seconds


class Outcome(NamedTuple):
    """Result of one rank on one layout.

    Attributes:
        share: the local loss.
        metrics: reduced.
        squared_error: of this rank's piece of the gradient.
        stray: a gradient at a place without loss.
        place: (tensor, context, data) rank.
        maps: [3, B, S] g·g*, |g*|² and |g − g*|² of each position's gradient g and reference g*; 0 on other ranks' positions.
        padding_gradient: in a padding column of the vocabulary.
        error: the exception, instead of all else.
    """

    share: float
    metrics: dict[str, float]
    squared_error: float
    stray: str
    place: tuple[int, int, int]
    maps: Tensor
    padding_gradient: bool = False
    error: str = ""


def run_layout(layout: Layout, trial: Trial, rank: Rank, dtype: torch.dtype) -> Outcome:
    """Run one optimizer step's loss on this rank, with logits of `dtype`."""
    batch = trial.batch
    step = cut_step(trial, layout, rank, dtype, consume=layout.micro_batches > 1)
    leaves = [step.local(batch.logits, piece).to(rank.device, dtype).requires_grad_() for piece in step.pieces]
    outputs = [(leaf * 1.0).view(*piece.shape, -1) for leaf, piece in zip(leaves, step.pieces, strict=True)]
    share, metrics, stray, padding_gradient = 0.0, [], "", False
    padding = torch.tensor([column is None for column in step.columns])
    maps = torch.zeros(3, batch.rows, batch.width, dtype=torch.float64)
    for (loss, parts), leaf, piece in zip(step.run(outputs), leaves, step.pieces, strict=True):
        loss.backward()
        share += loss.item()
        metrics.append(parts)
        gradient = torch.zeros(leaf.shape) if leaf.grad is None else leaf.grad.cpu()
        truth = step.local(trial.want.gradient, piece, poison=False)
        add_to_maps(maps, piece, gradient.double(), truth)
        if bool((gradient[truth == 0] != 0).any()):
            stray = f"{layout.name}: a masked place or a padding column has a gradient"
            padding_gradient |= bool((gradient[:, padding] != 0).any())
    reduced = reduced_numbers(metrics, rank.groups)
    return Outcome(share, reduced, maps[2].sum().item(), stray, rank.place, maps, padding_gradient)


RunLayout = Callable[[Layout, Trial, Rank, torch.dtype], Outcome]


def add_to_maps(maps: Tensor, piece: Piece, gradient: Tensor, truth: Tensor) -> None:
    """Add a piece's gradient and reference to `Outcome.maps`."""
    rows, columns, _ = piece.indices()  # padding counts at the first row
    numbers = torch.stack([gradient * truth, truth.square(), (gradient - truth).square()]).sum(-1)
    maps.view(3, -1).index_add_(1, rows * maps.shape[2] + columns, numbers)


def check_world(
    rank: int, of_world: Sequence[Layout], given: list[Trial], dtype: torch.dtype, keep_going: bool = False
) -> list[tuple[str, str, Outcome]]:
    """Run every case on every layout; return (case, layout, outcome).

    With `keep_going` an error is an outcome, and ranks agree after each layout, so that a hung collective is located.
    """
    outcomes = []
    ranks: dict[tuple[int, int], Rank] = {}
    for layout in of_world:
        key = (layout.tp, layout.cp)
        if key not in ranks:
            ranks[key] = Rank(*make_groups(rank, dist.get_world_size(), *key))
        for trial in given:
            run = attempt if keep_going else run_layout
            outcomes.append((trial.case.name, layout.name, run(layout, trial, ranks[key], dtype)))
    return outcomes


@empty_rows_on_purpose()
def attempt(layout: Layout, trial: Trial, rank: Rank, dtype: torch.dtype, run: RunLayout = run_layout) -> Outcome:
    """Call `run`, with an error as outcome; RuntimeError if another rank hangs until the world's timeout."""
    try:
        outcome = run(layout, trial, rank, dtype)
    except (Exception, SystemExit) as error:
        maps = torch.zeros(3, trial.batch.rows, trial.batch.width, dtype=torch.float64)
        outcome = Outcome(torch.nan, {}, torch.nan, "", rank.place, maps, error=describe(error))
    arrived = dist.barrier(async_op=True)
    try:
        if outcome.error:
            _wait_a_little(arrived)
        arrived.wait()
    except RuntimeError as error:
        why = outcome.error or "it waited for another rank, which did not come out of the loss"
        raise RuntimeError(f"{trial.case.name} on {layout.name}: {why}") from error
    return outcome


def _wait_a_little(arrived: dist.Work) -> None:
    """Wait briefly for other ranks after an error; RuntimeError if they hang in a collective of the loss."""
    end = time.monotonic() + _PATIENCE
    while not arrived.is_completed():
        if time.monotonic() > end:
            raise RuntimeError("the other ranks did not arrive")
        time.sleep(0.01)
