"""Diagnosis: which axis breaks the law, by what factor, and the classic fault that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from parallel_rl.testing import faults as F
from parallel_rl.testing.alone import Alone
from parallel_rl.testing.cases import Trial
from parallel_rl.testing.faults import Fault
from parallel_rl.testing.layouts import Layout, cut_rows
from parallel_rl.testing.observe import Observation, Part

_CLOSE = 1e-6  # of factors: a right one fits to many digits


@dataclass(frozen=True)
class Finding:
    """One fault of a loss.

    Attributes:
        fault: the classic fault that fits.
        axis: one of `EVERY_AXIS` or "one process", or several joined by " × ".
        text: the numbers, in a sentence.
        layouts: affected layouts.
    """

    fault: Fault
    axis: str
    text: str
    layouts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.axis}: {self.fault.name}. {self.text}\n    fix: {self.fault.fix}"


def of_one_process(result: Alone) -> list[Finding]:
    """Name the faults of the checks on one process."""
    wrong: list[tuple[Fault, str]] = []
    if result.error:
        wrong.append((F.RAISES, result.error))
    if result.where == "unshifted":
        wrong.append((F.UNSHIFTED, "the gradient is at the positions of valid tokens, not at those that predict them."))
    elif result.where:
        wrong.append((F.ELSEWHERE, "positions that predict no valid token have a gradient."))
    elif result.poison == "gradient":
        wrong.append((F.MASK_AFTER, "NaN and inf at masked places leave the loss alone and make its gradient NaN."))
    elif result.poison == "loss":
        wrong.append((F.MASK_MULTIPLIES, "NaN and inf at masked places reach the loss."))
    elif result.poison:
        wrong.append((F.MASKED_READ, f"with NaN, inf and wild ids at masked places it raises {result.poison}."))
    if result.empty:
        wrong.append((F.EMPTY, f"{result.empty}."))
    for value, limit, fault, text in (
        (result.derivative, 1e-5, F.DERIVATIVE, "it differs from finite differences by"),
        (result.permuted, 1e-9, F.ORDER, "under a permutation of the rows the gradient moves by"),
        (result.doubled, 1e-9, F.COUNT, "with every row twice loss and gradient are off by"),
    ):
        if value > limit:
            wrong.append((fault, f"{text} {value:.1e} of its size."))
    wrong += [(F.CLAIM, f"{claim}.") for claim in result.claims]
    return [Finding(fault, "one process", text) for fault, text in wrong]


def of_layouts(trial: Trial, observations: Sequence[Observation], tolerance: float) -> list[Finding]:
    """Name the fault of each broken axis, single axes first; skip axes that an earlier fault explains."""
    findings: list[Finding] = []
    explained: set[str] = set()
    broken = [seen for seen in observations if seen.broken(tolerance)]
    by_positions = any(seen.layout.axes == {"packing"} and _of_positions(trial, seen) for seen in broken)
    for seen in sorted(broken, key=lambda seen: len(seen.layout.axes)):
        if explained & seen.layout.axes or any(f.axis == "one process" and f.fault is not F.METRIC for f in findings):
            continue
        axis = " × ".join(sorted(_blamed(seen, observations, broken))) or "one process"
        fault, text = (by_positions and _of_positions(trial, seen)) or _fault(trial, seen, tolerance)
        if fault is F.CONTEXT_MISSING and any(f.fault is F.LOCAL_STATISTIC for f in findings):
            fault = F.LOCAL_STATISTIC
        where = [other.layout.name for other in broken if seen.layout.axes <= other.layout.axes]
        _join(findings, Finding(fault, axis, text, tuple(where)))
        explained |= _blamed(seen, observations, broken)
    return findings


def _blamed(seen: Observation, observations: Sequence[Observation], broken: Sequence[Observation]) -> frozenset[str]:
    """Return the axes of a broken layout that no correct layout has."""
    axes = seen.layout.axes
    right = [other.layout.axes for other in observations if other not in broken and other.layout.axes < axes]
    return axes - max(right, key=len, default=frozenset())


def _join(findings: list[Finding], new: Finding) -> None:
    """Add a finding, or its axis to one of the same fault."""
    for i, known in enumerate(findings):
        if known.fault is new.fault:
            where = (*known.layouts, *(name for name in new.layouts if name not in known.layouts))
            findings[i] = replace(known, axis=f"{known.axis}, {new.axis}", layouts=where)
            return
    findings.append(new)


def without_consequences(findings: Sequence[Finding]) -> list[Finding]:
    faults = {finding.fault for finding in findings}
    follows = {
        F.COUNT: {F.ORDER, F.LOCAL_STATISTIC},
        F.LOCAL_STATISTIC: {F.ORDER},
        F.CONTEXT_MISSING: {F.ORDER},
    }
    return [finding for finding in findings if not follows.get(finding.fault, set()) & faults]


def _fault(trial: Trial, seen: Observation, tolerance: float) -> tuple[Fault, str]:
    axes = seen.layout.axes
    if seen.error:
        return F.RAISES, seen.error
    if seen.loss <= tolerance and seen.gradient <= tolerance and not (seen.stray or seen.tensor_differs):
        return F.METRIC, _metrics(seen)
    if not (math.isfinite(seen.loss) and math.isfinite(seen.gradient)):
        empty = [part for part in seen.parts if not part.tokens]
        if empty and trial.want and {"data", "micro-batches"} & axes:
            return (
                F.EMPTY,
                f"{len(empty)} of {len(seen.parts)} micro-batches have no valid token, and the result is NaN.",
            )
        return F.MASKED_READ, "the result is not finite."
    if seen.padding_gradient:
        return F.PADDING_COLUMNS, f"Columns from vocab_size on have a gradient. {_numbers(seen)}."
    if "tensor" in axes and (fault := _of_tensor_ranks(seen)):
        return fault
    if "context" in axes and (fault := _of_context_ranks(trial, seen, tolerance)):
        return fault
    if {"data", "micro-batches", "context"} & axes and (fault := _of_parts(seen)):
        return fault
    if {"data", "micro-batches"} & axes:
        return F.LOCAL_STATISTIC, f"No factor of a micro-batch explains its gradient. {_numbers(seen)}."
    if "context" in axes:
        return F.CONTEXT_MISSING, f"{_numbers(seen)}."
    if "packing" in axes and _only_at(trial, seen, _sequence_edges(trial, seen.layout)):
        return F.SEQUENCE_EDGE, f"{_numbers(seen)}, all of it at the ends of sequences."
    return F.UNKNOWN, f"{_numbers(seen)}."


def _numbers(seen: Observation) -> str:
    return (
        f"Loss × {seen.loss_factor:.6g}, gradient × {seen.gradient_factor:.6g}"
        + (f" and {seen.residual:.1e} of it elsewhere" if seen.residual > _CLOSE else "")
        + f" on {seen.layout.name}"
    )


def _metrics(seen: Observation) -> str:
    return (
        "; ".join(f"{name} is off by {error:.1e}" for name, error in seen.metrics.items()) + f" on {seen.layout.name}."
    )


def _of_tensor_ranks(seen: Observation) -> tuple[Fault, str] | None:
    if seen.tensor_differs:
        return F.TENSOR_MISSING, f"tensor ranks return different losses. {_numbers(seen)}."
    if seen.residual <= _CLOSE and _close(seen.gradient_factor, seen.layout.tp, 1 / seen.layout.tp):
        return F.TENSOR_SUMMED, f"{_numbers(seen)}."
    return None


def _of_positions(trial: Trial, seen: Observation) -> tuple[Fault, str] | None:
    """Recognise a mean over the call's positions: a packed row has fewer."""
    total = trial.batch.rows * trial.batch.width
    known = [part for part in seen.parts if part.tokens and math.isfinite(part.factor)]
    if not known or not _close_all([part.factor for part in known], [total / part.positions for part in known]):
        return None
    text = f"{total} positions of the padded batch / {known[0].positions} of its own, masked ones included"
    return (
        F.LOCAL_DENOMINATOR,
        f"a micro-batch's gradient is {known[0].factor:.6g} times what it should be on {seen.layout.name}: {text}.",
    )


def _of_parts(seen: Observation) -> tuple[Fault, str] | None:
    """Recognise each micro-batch's factor: N/n_i of a local denominator, w_i·N/n_i of a mean of means."""
    known = [part for part in seen.parts if part.tokens and math.isfinite(part.factor)]
    if len(known) < 2 or _close_all([part.factor for part in known], [1.0] * len(known)):
        return None
    number = len(seen.parts)
    if seen.residual <= _CLOSE and _close(seen.gradient_factor, 1 / number):
        return F.PARTS_AVERAGED, f"{_numbers(seen)}: 1/{number}."
    worst = max(known, key=lambda part: abs(math.log(max(abs(part.factor), 1e-300))))
    numbers = f"a micro-batch's gradient is {worst.factor:.6g} times what it should be on {seen.layout.name}"
    for unit, counts in (("tokens", [p.tokens for p in known]), ("sequences", [p.sequences for p in known])):
        total, count = sum(counts), counts[known.index(worst)]
        weights = [part.factor * count / total for part, count in zip(known, counts, strict=True)]
        weight = weights[known.index(worst)]
        if _close_all(weights, [1.0] * len(known)):
            return F.LOCAL_DENOMINATOR, f"{numbers}: {total} {unit} of the step / {count} of its own."
        for other in _weights_of_means(known):
            if _close_all(weights, other):
                return F.MEAN_OF_MEANS, f"{numbers}: it has {count} of {total} {unit}, and weighs {weight:.6g}."
    if seen.residual <= _CLOSE and _close(seen.gradient_factor, number):
        return F.PARTS_REPEATED, f"{_numbers(seen)}: {number}."
    return None


def _weights_of_means(parts: Sequence[Part]) -> list[list[float]]:
    """List the weights of an average of averages: equal, by valid rows, by rows."""
    valid, rows = [part.sequences for part in parts], [len(part.rows) for part in parts]
    return [[1 / len(parts)] * len(parts), [n / sum(valid) for n in valid], [n / sum(rows) for n in rows]]


def _of_context_ranks(trial: Trial, seen: Observation, tolerance: float) -> tuple[Fault, str] | None:
    cp = seen.layout.cp
    uniform = seen.residual <= _CLOSE
    if seen.loss <= tolerance and seen.gradient > tolerance:
        return F.CONTEXT_BACKWARD, f"The loss is right and its gradient is not. {_numbers(seen)}."
    if uniform and _close(seen.gradient_factor, 1 / cp):
        return F.CONTEXT_AVERAGED, f"{_numbers(seen)}: 1/cp."
    if uniform and _close(seen.gradient_factor, cp):
        return F.CONTEXT_SUMMED, f"{_numbers(seen)}: cp."
    if _only_at(trial, seen, _shard_edges(trial, seen.layout)):
        return F.SHARD_EDGE, f"{_numbers(seen)}, all of it at the last positions of shards."
    return None


def _shard_edges(trial: Trial, layout: Layout) -> set[tuple[int, int]]:
    """Return the last position of each run of neighbours on a context rank."""
    edges: set[tuple[int, int]] = set()
    for rank in range(layout.cp):
        for part in _cuts(trial, layout, rank):
            edges |= {
                here
                for here, following in zip(part, [*part[1:], None], strict=True)
                if here is not None and following != (here[0], here[1] + 1)
            }
    return edges


def _sequence_edges(trial: Trial, layout: Layout) -> set[tuple[int, int]]:
    batch = trial.batch
    ends = {(row, length - 1) for row, length in enumerate(batch.lengths)}
    rooms = {
        max(here for here in part if here is not None and here[0] == row)
        for part in _cuts(trial, layout, 0)
        for row in {here[0] for here in part if here is not None}
    }
    return ends | rooms


def _cuts(trial: Trial, layout: Layout, cp_rank: int) -> list[list[tuple[int, int] | None]]:
    batch = trial.batch
    size = batch.rows // (layout.dp * layout.micro_batches)
    return [
        cut_rows(
            list(range(start, start + size)), batch.lengths, batch.width, layout, cp_rank, batch.data["input_ids"]
        ).places
        for start in range(0, batch.rows, size)
    ]


def _only_at(trial: Trial, seen: Observation, places: set[tuple[int, int]]) -> bool:
    """Return whether the gradient's error is only at these places."""
    if seen.position_errors is None or not places:
        return False
    there = torch.zeros_like(seen.position_errors, dtype=torch.bool)
    rows, columns = zip(*places, strict=True)
    there[list(rows), list(columns)] = True
    total = float(seen.position_errors.sum())
    return float(seen.position_errors[~there].sum()) <= 1e-12 * total


def _close(value: float, *wanted: float) -> bool:
    return any(abs(value - target) <= _CLOSE * abs(target) for target in wanted)


def _close_all(values: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(_close(value, target) for value, target in zip(values, wanted, strict=True))
