"""Compare one layout's step with one process: loss, metrics, norm, and each weight's gradient and update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel_rl.testing.whole_step.layouts import StepLayout
from parallel_rl.testing.whole_step.parts import Weighing
from parallel_rl.testing.whole_step.subject import Piece, RankResult, Truth, part

NO_ANSWER = "no answer in"  # within an error: a rank that hangs
_CLOSE = 1e-3  # of a factor that explains an error
_AXES = ("tensor", "context", "data", "expert", "pipeline")

_SUMMED = (
    ("tensor",), ("context",), ("data",), ("context", "data"), ("expert",), ("tensor", "context"), ("pipeline",),
)  # fmt: skip


@dataclass(frozen=True)
class WeightError:
    """One weight whose gradient differs."""

    name: str
    error: float  # |g − g*| / |g*| over all ranks
    factor: float | None  # by which the gradient is too large on every rank; None if no single factor explains it
    text: str  # the explanation: a factor, one factor a rank, or parts that were not summed
    missing: tuple[str, ...] = ()  # axes over whose ranks the gradient was not summed
    weighed: Weighing | None = None  # the weight of each part of the step's tokens, if that explains the gradient
    by_rank: bool = False  # each rank's gradient has its own factor

    @property
    def unexplained(self) -> bool:
        """Return whether the weight trains on both sides and no single factor explains its gradient."""
        return self.factor is None and math.isfinite(self.error) and not self.by_rank


@dataclass(frozen=True)
class Compared:
    """One layout's relative errors, each the largest of its kind."""

    layout: StepLayout
    loss: float = math.nan
    gradient: float = math.nan
    norm: float = math.nan
    weights: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)  # without the loss
    gradients: tuple[WeightError, ...] = ()  # the weights whose gradients differ
    unmarked: tuple[str, ...] = ()  # sharded weights that Megatron's norm treats as whole
    overmarked: tuple[str, ...] = ()  # whole weights that Megatron's norm treats as sharded
    norm_factor: float = 1.0
    loss_factor: float = 1.0
    loss_shift: float = 0.0  # the loss minus that of one process
    counted: tuple[str, float] | None = None  # a weight, and how often the norm counts it, if that explains the norm
    moved: float = 1.0  # factor of the weights' update
    error: str = ""  # a rank's exception
    refused: bool = False  # refused by name, and not run

    @property
    def hung(self) -> bool:
        return NO_ANSWER in self.error

    def broken(self, bound: float) -> bool:
        """Return whether the layout ran and differs from one process."""
        if self.error:
            return not self.refused
        numbers = (self.loss, self.gradient, self.norm, self.weights, *self.metrics.values())
        return not all(value <= bound for value in numbers)


def compare(layout: StepLayout, results: Sequence[RankResult], truth: Truth, bound: float) -> Compared:
    pieces: dict[str, list[tuple[RankResult, Piece]]] = defaultdict(list)
    for result in results:
        for piece in result.pieces:
            pieces[piece.name].append((result, piece))
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in truth.gradients.values()))
    errors = []
    worst = moved_error = 0.0
    moves = [0.0, 0.0]
    for name, copies in pieces.items():
        error = _frozen(name, copies, truth) or _of_weight(name, copies, truth, whole, bound)
        worst = max(worst, error.error if not math.isnan(error.error) else math.inf)
        if not error.error <= bound:
            errors.append(error)
        moved_error = max(moved_error, _of_update(name, copies, truth, whole, moves))
    lost = sorted(set(truth.gradients) - set(pieces))
    if lost:
        worst = math.inf
        errors += [WeightError(name, math.inf, 0.0, "is on no rank") for name in lost]
    norms = {result.norm for result in results}
    norm = max(norms, key=lambda value: abs(value - truth.norm))
    metrics, loss_factor = _of_metrics(results, truth)
    loss = metrics.pop(_loss_name(truth), math.nan)
    several = [
        (name, copies)
        for name, copies in pieces.items()
        if copies[0][1].cut is not None and copies[0][1].cut[2] > 1 and name in truth.gradients
    ]
    cut = {name for name, _ in several}
    off = not abs(norm - truth.norm) <= bound * truth.norm
    return Compared(
        layout,
        loss,
        worst,
        abs(norm - truth.norm) / truth.norm,
        moved_error,
        metrics,
        tuple(errors),
        tuple(name for name, copies in several if off and not copies[0][1].marked),
        tuple(name for name, copies in pieces.items() if copies[0][1].marked and name not in cut and layout.tp > 1)
        if off
        else (),
        norm / truth.norm,
        loss_factor,
        (loss_factor - 1) * truth.metrics.get(_loss_name(truth), 0.0),
        _counted(norm, truth) if off and not errors else None,
        moves[0] / moves[1] if moves[1] else 1.0,
    )


def _frozen(name: str, copies: Sequence[tuple[RankResult, Piece]], truth: Truth) -> WeightError | None:
    """Compare where a weight trains, here and on one process; return None if it trains on both."""
    trains = [piece.gradient is not None for _, piece in copies]
    if name not in truth.gradients:
        text = "trains on this layout and is frozen on one process"
        return WeightError(name, math.inf, None, text) if any(trains) else WeightError(name, 0.0, 1.0, "")
    if all(trains):
        return None
    ranks = "" if not any(trains) else f", on {len(trains) - sum(trains)} of {len(trains)} ranks that hold it"
    return WeightError(name, math.inf, None, f"frozen on this layout{ranks}")


def _of_weight(
    name: str, copies: Sequence[tuple[RankResult, Piece]], truth: Truth, whole: float, bound: float
) -> WeightError:
    wanted = truth.gradients[name]
    rows: list[tuple[Mapping[str, int], Tensor, Tensor]] = []
    for result, piece in copies:
        assert piece.gradient is not None  # see _frozen
        right = part(wanted, piece.cut, piece.gradient.shape)
        rows.append((result.place, piece.gradient.double(), right.double()))
    size = math.sqrt(sum(float(right.square().sum()) for *_, right in rows))
    off = math.sqrt(sum(float((g - right).square().sum()) for _, g, right in rows))
    floor = 1e-7 * whole * math.sqrt(len(rows))  # a gradient that is zero but for rounding, as that of a key's bias
    error = off / max(size, floor)
    if error <= bound:
        return WeightError(name, error, 1.0, "")
    known = [(place, g, right) for place, g, right in rows if float(right.norm()) > 1e-9 * whole]
    factors = [float((g * right).sum() / right.square().sum()) for _, g, right in known]
    fits = [
        float((g - f * right).norm()) <= _CLOSE * max(abs(f), _CLOSE) * float(right.norm())
        for (_, g, right), f in zip(known, factors, strict=True)
    ]
    if not known:
        return WeightError(name, error, None, f"has a gradient where one process has none ({off:.1e})")
    if all(fits) and max(factors) - min(factors) <= _CLOSE * max(map(abs, factors)):
        return WeightError(name, error, factors[0], f"gradient × {factors[0]:.6g}")
    lost = all(fits) and all(min(abs(factor), abs(factor - 1)) <= _CLOSE for factor in factors)
    if not lost and (parts := _in_parts(rows)) is not None:
        axes, factor = parts
        return WeightError(
            name,
            error,
            factor,
            f"gradient is left in parts on {' × '.join(axes)} ranks, whose sum is × {factor:.6g}",
            axes,
        )
    if all(fits):
        text = _by_rank([place for place, *_ in known], factors)
        return WeightError(name, error, None, f"gradient {text}", by_rank=lost)
    factor = sum(factors) / len(factors)
    rest = math.sqrt(sum(float((g - factor * r).square().sum()) for _, g, r in known)) / size
    return WeightError(name, error, None, f"gradient × {factor:.6g} on average and {rest:.1e} of it elsewhere")


def _in_parts(rows: Sequence[tuple[Mapping[str, int], Tensor, Tensor]]) -> tuple[tuple[str, ...], float] | None:
    """Find the axes over which the copies of a gradient sum to a multiple of the right gradient."""
    for axes in _SUMMED:
        if any(len({place[axis] for place, *_ in rows}) < 2 for axis in axes):
            continue
        sums: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for place, g, right in rows:
            sums[tuple(place[axis] for axis in _AXES if axis not in axes)].append((g, right))
        factors = []
        for group in sums.values():
            total, right = torch.stack([g for g, _ in group]).sum(0), group[0][1]
            if len(group) < 2 or not bool((right == group[-1][1]).all()) or not float(right.norm()):
                break
            factor = float((total * right).sum() / right.square().sum())
            if not float((total - factor * right).norm()) <= _CLOSE * abs(factor) * float(right.norm()):
                break
            factors.append(factor)
        if len(factors) == len(sums) and max(factors) - min(factors) <= _CLOSE * max(map(abs, factors)):
            return axes, factors[0]
    return None


def _by_rank(places: Sequence[Mapping[str, int]], factors: Sequence[float]) -> str:
    """Describe factors that differ between ranks, by the axis that separates them."""
    for axis in _AXES:
        of_rank: dict[int, set[float]] = defaultdict(set)
        for place, factor in zip(places, factors, strict=True):
            of_rank[place[axis]].add(round(factor, 3))
        if len(of_rank) > 1 and all(len(values) == 1 for values in of_rank.values()):
            return ", ".join(f"× {min(values):g} on {axis} rank {rank}" for rank, values in sorted(of_rank.items()))
    return "× " + ", ".join(f"{factor:.4g}" for factor in sorted(set(factors)))


def _of_update(
    name: str, copies: Sequence[tuple[RankResult, Piece]], truth: Truth, whole: float, moves: list[float]
) -> float:
    """Return the relative error of a weight's update; add its product with the right update to `moves`."""
    off = size = 0.0
    for _, piece in copies:
        before, after = (
            part(weights[name], piece.cut, piece.after.shape).double() for weights in (truth.before, truth.after)
        )
        right, got = after - before, piece.after.double() - before
        off += float((got - right).square().sum())
        size += float(right.square().sum())
        moves[0] += float((got * right).sum())
        moves[1] += float(right.square().sum())
    floor = 1e-7 * whole * (truth.clip / truth.norm) * math.sqrt(len(copies))
    return math.sqrt(off) / max(math.sqrt(size), floor)


def _of_metrics(results: Sequence[RankResult], truth: Truth) -> tuple[dict[str, float], float]:
    """Return each metric's largest relative error over ranks, and the factor of the loss."""
    errors, factor, loss = {}, 1.0, _loss_name(truth)
    for name, right in truth.metrics.items():
        values = [result.metrics.get(name, math.nan) for result in results]
        errors[name] = max(
            (abs(value - right) / max(abs(right), 1e-12) for value in values),
            key=lambda error: math.inf if math.isnan(error) else error,
        )
        if name == loss and right:
            factor = max(values, key=lambda value: abs(value - right)) / right
    return errors, factor


def _loss_name(truth: Truth) -> str:
    return next((name for name in truth.metrics if "loss" in name), "loss")


def _counted(norm: float, truth: Truth) -> tuple[str, float] | None:
    """Find one weight whose wrong count in the norm explains the norm's error."""
    more = norm**2 - truth.norm**2
    for name, gradient in truth.gradients.items():
        square = float(gradient.double().square().sum())
        if square <= 1e-9 * truth.norm**2:
            continue
        times = 1 + more / square
        if abs(times - round(times)) < 1e-4 * max(1.0, truth.norm**2 / square * 1e-3) and 0 <= round(times) <= 8:
            return name, float(round(times))
    return None
