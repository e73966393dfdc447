"""Findings of a layout's errors: weights, layout, factor and the nearest known cause."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parallel_rl.testing.whole_step.compare import Compared, WeightError
from parallel_rl.testing.whole_step.gradient_causes import Facts, gradient_cause

_SHOWN = 3  # weights that a finding lists
_RANDOM = (
    "the model is random, by dropout or noise that its config does not turn off, so layouts cannot be compared; set its rate "
    "to 0 for the check"
)


@dataclass(frozen=True)
class StepFinding:
    """One difference from the step of one process.

    Attributes:
        what: gradient, norm, loss, metric, weights or error.
        axis: part of the layout that causes it, such as "context".
        weights: names of the wrong weights; empty if the finding is about no single weight.
        factor: by which the value is too large; None if no single factor explains it.
        text: numbers of the first layout that shows it. cause: the nearest known cause and its cure.
        layouts: names of the layouts that show it.
    """

    what: str
    axis: str
    weights: tuple[str, ...]
    factor: float | None
    text: str
    cause: str
    layouts: tuple[str, ...]

    def __str__(self) -> str:
        several = f" ({len(self.layouts)} layouts)" if len(self.layouts) > 1 else ""
        return f"{self.axis}: {self.text}{several}\n    cause: {self.cause}"


def diagnose(layouts: Sequence[Compared], bound: float, facts: Facts) -> list[StepFinding]:
    """List the findings, layouts with the fewest axes first."""
    broken = sorted(
        (compared for compared in layouts if compared.broken(bound)), key=lambda compared: len(compared.layout.axes)
    )
    right = [compared for compared in layouts if not compared.error and not compared.broken(bound)]
    findings: list[StepFinding] = []
    if facts.random:
        names = tuple(compared.layout.name for compared in broken if not compared.error)
        findings.append(StepFinding("random", "one process", (), None, facts.random, _RANDOM, names))
        broken = [compared for compared in broken if compared.error]
    for compared in broken:
        axes = _blamed(compared, right)
        axis = " × ".join(sorted(axes)) or "one process"
        for finding in _of_layout(compared, axis, bound, facts):
            _join(findings, finding)
    return findings


def _blamed(compared: Compared, right: Sequence[Compared]) -> frozenset[str]:
    """Return the axes of a broken layout that no right layout has; all its axes if none is left."""
    axes = compared.layout.axes
    within = [other.layout.axes for other in right if other.layout.axes < axes]
    unexplained = axes - max(within, key=len, default=frozenset())
    return unexplained - frozenset().union(*(other.layout.axes for other in right)) or unexplained


def _join(findings: list[StepFinding], new: StepFinding) -> None:
    for i, known in enumerate(findings):
        if (known.what, known.cause) == (new.what, new.cause) and (
            known.weights == new.weights or {*known.weights} & {*new.weights}
        ):
            findings[i] = replace(known, layouts=(*known.layouts, *new.layouts))
            return
    findings.append(new)


def _of_layout(compared: Compared, axis: str, bound: float, facts: Facts) -> Iterator[StepFinding]:
    name = (compared.layout.name,)
    if compared.error:
        yield StepFinding("error", axis, (), None, f"{compared.error} on {name[0]}", _of_error(compared), name)
        return
    by_cause: dict[str, list[list[WeightError]]] = defaultdict(list)
    for group in _groups(compared.gradients):
        by_cause[gradient_cause(compared, group, axis, facts)].append(group)
    for cause, groups in by_cause.items():
        names = tuple(error.name for group in groups for error in group)
        worst = max(groups, key=lambda group: group[0].error)[0]
        text = f"{_listed(names, facts.number)}: {worst.text} on {name[0]}"
        if len(groups) > 1:
            text = f"{worst.name}: {worst.text} on {name[0]}, and {len(names) - 1} other weights otherwise"
        yield StepFinding("gradient", axis, names, worst.factor, text, cause, name)
    if not compared.gradients:
        yield from _of_norm(compared, axis, bound, name)
    if not compared.gradients and not compared.loss <= bound:
        text = f"loss × {compared.loss_factor:.6g} on {name[0]}, though every gradient is right"
        yield StepFinding(
            "loss",
            axis,
            (),
            compared.loss_factor,
            text,
            "what is logged is not what trains: " + _of_log(compared),
            name,
        )
    wrong = {metric: error for metric, error in compared.metrics.items() if not error <= bound}
    if wrong and not compared.gradients:
        text = ", ".join(f"{metric} is off by {error:.1e}" for metric, error in wrong.items()) + f" on {name[0]}"
        yield StepFinding(
            "metric", axis, tuple(wrong), None, text, "it is not reduced over every axis of the layout", name
        )


def _of_norm(compared: Compared, axis: str, bound: float, name: tuple[str]) -> Iterator[StepFinding]:
    if not compared.norm <= bound:
        weights, cause = compared.unmarked or compared.overmarked, "no single weight explains it"
        text = f"the norm that clips is × {compared.norm_factor:.6g} on {name[0]}, though every gradient is right"
        if compared.unmarked:
            text = (
                f"{_listed(compared.unmarked, 0)}: cut over tensor ranks and not marked as cut; the norm that clips is × "
                f"{compared.norm_factor:.6g} on {name[0]}"
            )
            cause = (
                "attention sinks that Megatron does not mark (Megatron-LM #7530); parallel_rl.megatron.wrap_model marks them"
                if all(weight.endswith("softmax_offset") for weight in compared.unmarked)
                else "Megatron counts an unmarked weight on tensor rank 0 alone; call "
                "tensor_parallel.set_tensor_model_parallel_attributes(weight, True, dim, 1) where the weight is made"
            )
        elif compared.overmarked:
            text = f"{_listed(compared.overmarked, 0)}: whole on each tensor rank and marked as cut; {text}"
            cause = "Megatron counts it once for each tensor rank; leave tensor_model_parallel unset"
        elif compared.counted is not None:
            weights = (compared.counted[0],)
            times = f"{compared.counted[1]:g} times in the norm that clips"
            text = f"{compared.counted[0]} is counted {times}, × {compared.norm_factor:.6g} on {name[0]}"
            cause = "its marks (shared, shared_embedding, tensor_model_parallel, allreduce) do not say how it is held"
        yield StepFinding("norm", axis, weights, compared.norm_factor, text, cause, name)
    elif not compared.weights <= bound:
        text = f"weights move × {compared.moved:.6g} on {name[0]}, though gradients and norm are right"
        yield StepFinding(
            "weights",
            axis,
            (),
            compared.moved,
            text,
            "the optimizer's step: replicas or shards do not step alike",
            name,
        )


def _groups(errors: Sequence[WeightError]) -> list[list[WeightError]]:
    """Group weights by sentence: left in parts, scaled by one factor, all others."""
    groups: dict[object, list[WeightError]] = defaultdict(list)
    for error in errors:
        if error.weighed is not None:
            key: object = error.text
        elif error.missing or error.factor is not None:
            key = (error.missing, round(error.factor or 0.0, 4))
        else:
            key = (math.isinf(error.error), " rank " in error.text)
        groups[key].append(error)
    ordered = sorted(groups.values(), key=len, reverse=True)
    if len(ordered) > 4:  # no factor holds for many: one finding with the worst weight first
        return [sorted(errors, key=lambda error: -error.error)]
    return [sorted(group, key=lambda error: -error.error) for group in ordered]


def _listed(names: Sequence[str], number: int) -> str:
    if number and len(names) >= number:
        return f"all {number} weights"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _of_log(compared: Compared) -> str:
    if not compared.layout.per_token:
        return "a mean of what each micro-batch or shard reports"
    return "a sum or a count that is not reduced over every axis of the layout"


def _of_error(compared: Compared) -> str:
    if compared.hung:
        return "one process runs the same step: a rank loops, or waits in a collective that another rank does not enter"
    if "differ in the model's weights" in compared.error:
        return (
            "a weight with other values on these ranks is marked as one that they share; experts need allreduce = False"
            if compared.layout.ep > 1
            else "a weight that these ranks share is initialised or changed by rank"
        )
    if compared.layout.world == 1:
        return "one process runs the step on padded rows in one micro-batch; other rows or settings break it"
    if compared.error.startswith("every rank"):
        return (
            "one process runs the same step: what the layout changes on all ranks, such as sizes or shapes, breaks it"
        )
    return (
        "one process runs the same step: what this rank alone has, such as its stage, its shard or its rows, breaks it"
    )
