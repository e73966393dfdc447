"""Comparison of a layout with the reference, in the numbers that a diagnosis needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel_rl.testing.batches import carries_loss
from parallel_rl.testing.cases import Trial
from parallel_rl.testing.layouts import Layout, cut_rows
from parallel_rl.testing.step import Outcome


@dataclass(frozen=True)
class Part:
    """A micro-batch on one data and context rank."""

    rows: list[int]
    sequences: int  # valid ones
    tokens: int  # valid ones that this context rank predicts
    positions: int  # of the logits on this context rank, including masked ones and padding
    factor: float  # g·g* / |g*|² of its positions; NaN without a reference gradient


@dataclass(frozen=True, eq=False)
class Observation:
    """One layout's result compared with the reference."""

    layout: Layout
    loss: float = math.nan  # relative error
    gradient: float = math.nan  # relative error
    metrics: dict[str, float] = field(default_factory=dict)  # errors of wrong metrics; infinity for a missing one
    loss_factor: float = math.nan  # Σ local losses / L
    gradient_factor: float = math.nan  # g·g* / |g*|², which explains most of the gradient
    residual: float = math.nan  # |g − factor·g*| / |g*|, unexplained
    parts: tuple[Part, ...] = ()  # micro-batches of the data and context ranks
    position_errors: Tensor | None = None  # [B, S] |g − g*|² of each position
    tensor_differs: bool = False  # tensor ranks of one data and context rank disagree
    stray: bool = False  # a gradient at a place without loss
    padding_gradient: bool = False  # a gradient in a padding column of the vocabulary
    error: str = ""  # the exception raised

    def broken(self, tolerance: float) -> bool:
        right = self.loss <= tolerance and self.gradient <= tolerance and not self.metrics
        return bool(self.error or self.tensor_differs or self.stray or not right)


def observe(trial: Trial, layout: Layout, outcomes: Sequence[Outcome], tolerance: float) -> Observation:
    """Compare all ranks' outcomes on one layout with the reference."""
    errors = sorted({outcome.error for outcome in outcomes if outcome.error})
    if errors:
        return Observation(layout, error="; ".join(errors))
    want, batch = trial.want, trial.batch
    first = [outcome for outcome in outcomes if outcome.place[0] == 0]
    whole = first if batch.logits.shape[-1] == 1 else outcomes  # a scalar head is whole on every tensor rank
    dot, truth, error = torch.stack([outcome.maps for outcome in whole]).sum(0)
    norm = max(float(truth.sum()), 1e-300)
    factor = float(dot.sum()) / norm
    share = sum(outcome.share for outcome in first)
    # |g − f·g*|² = |g − g*|² + 2(1 − f)·(g − g*)·g* + (1 − f)²·|g*|², where (g − g*)·g* = (f − 1)·|g*|²
    unexplained = float(error.sum()) - (1 - factor) ** 2 * norm
    return Observation(
        layout,
        loss=relative(share, want.loss, 1e-3),
        gradient=math.sqrt(float(error.sum()) / norm) if math.isfinite(factor) else math.nan,
        metrics=_metric_errors(outcomes[0].metrics, want.metrics, tolerance),
        loss_factor=share / want.loss if want.loss else math.nan,
        gradient_factor=factor,
        residual=math.sqrt(max(unexplained, 0.0) / norm),
        parts=_parts(trial, layout, dot, truth),
        position_errors=error,
        tensor_differs=_tensor_ranks_differ(outcomes),
        stray=any(outcome.stray for outcome in outcomes),
        padding_gradient=any(outcome.padding_gradient for outcome in outcomes),
    )


def relative(got: float, want: float, floor: float) -> float:
    """Return |got − want| / max(|want|, floor); NaN stays NaN."""
    return abs(got - want) / max(abs(want), floor)


def _metric_errors(got: dict[str, float], want: dict[str, float], tolerance: float) -> dict[str, float]:
    errors = {}
    for name in sorted({*got, *want}):
        here, there = got.get(name, math.inf), want.get(name, math.inf)
        if here == there or (math.isnan(here) and math.isnan(there)):
            continue
        error = relative(here, there, 1e-2) if math.isfinite(here) and math.isfinite(there) else math.inf
        if not error <= tolerance:
            errors[name] = error
    return errors


def _tensor_ranks_differ(outcomes: Sequence[Outcome]) -> bool:
    seen: dict[tuple[int, int], Outcome] = {}
    for outcome in outcomes:
        twin = seen.setdefault(outcome.place[1:], outcome)
        if not (
            _same(outcome.share, twin.share) and all(_same(x, twin.metrics[k]) for k, x in outcome.metrics.items())
        ):
            return True
    return False


def _same(value: float, other: float) -> bool:
    return value == other or (math.isnan(value) and math.isnan(other))


def _parts(trial: Trial, layout: Layout, dot: Tensor, truth: Tensor) -> tuple[Part, ...]:
    batch, parts = trial.batch, []
    carries, sample_mask = carries_loss(batch.data, trial.case.build()), batch.data["sample_mask"]
    size = batch.rows // (layout.dp * layout.micro_batches)
    for start in range(0, batch.rows, size):
        rows = list(range(start, start + size))
        for cp_rank in range(layout.cp):
            piece = cut_rows(rows, batch.lengths, batch.width, layout, cp_rank, batch.data["input_ids"])
            at_rows, at_columns, there = piece.indices()
            here = at_rows[there], at_columns[there]
            tokens = int(piece.joined(carries.long())[here].sum())
            norm = float(truth[here].sum())
            factor = float(dot[here].sum()) / norm if norm else math.nan
            parts.append(Part(rows, int(sample_mask[rows].sum()), tokens, len(there), factor))
    return tuple(parts)
