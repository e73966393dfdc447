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


def diagnose(seen: Sequence[Compared], bound: float, facts: Facts) -> list[StepFinding]:
    """List the findings, layouts with the fewest axes first."""
    broken = sorted((one for one in seen if one.broken(bound)), key=lambda one: len(one.layout.axes))
    right = [one for one in seen if not one.error and not one.broken(bound)]
    findings: list[StepFinding] = []
    if facts.random:
        names = tuple(one.layout.name for one in broken if not one.error)
        findings.append(StepFinding("random", "one process", (), None, facts.random, _RANDOM, names))
        broken = [one for one in broken if one.error]
    for one in broken:
        axes = _blamed(one, right)
        axis = " × ".join(sorted(axes)) or "one process"
        for finding in _of_layout(one, axis, bound, facts):
            _join(findings, finding)
    return findings


def _blamed(one: Compared, right: Sequence[Compared]) -> frozenset[str]:
    """Return the axes of a broken layout that no right layout has; all its axes if none is left."""
    axes = one.layout.axes
    within = [other.layout.axes for other in right if other.layout.axes < axes]
    left = axes - max(within, key=len, default=frozenset())
    return left - frozenset().union(*(other.layout.axes for other in right)) or left


def _join(findings: list[StepFinding], new: StepFinding) -> None:
    for i, known in enumerate(findings):
        if (known.what, known.cause) == (new.what, new.cause) and (
            known.weights == new.weights or {*known.weights} & {*new.weights}
        ):
            findings[i] = replace(known, layouts=(*known.layouts, *new.layouts))
            return
    findings.append(new)


def _of_layout(one: Compared, axis: str, bound: float, facts: Facts) -> Iterator[StepFinding]:
    name = (one.layout.name,)
    if one.error:
        yield StepFinding("error", axis, (), None, f"{one.error} on {name[0]}", _of_error(one), name)
        return
    by_cause: dict[str, list[list[WeightError]]] = defaultdict(list)
    for group in _groups(one.gradients):
        by_cause[gradient_cause(one, group, axis, facts)].append(group)
    for cause, groups in by_cause.items():
        names = tuple(error.name for group in groups for error in group)
        worst = max(groups, key=lambda group: group[0].error)[0]
        text = f"{_listed(names, facts.number)}: {worst.text} on {name[0]}"
        if len(groups) > 1:
            text = f"{worst.name}: {worst.text} on {name[0]}, and {len(names) - 1} other weights otherwise"
        yield StepFinding("gradient", axis, names, worst.factor, text, cause, name)
    if not one.gradients:
        yield from _of_norm(one, axis, bound, name)
    if not one.gradients and not one.loss <= bound:
        text = f"loss × {one.loss_factor:.6g} on {name[0]}, though every gradient is right"
        yield StepFinding(
            "loss", axis, (), one.loss_factor, text, "what is logged is not what trains: " + _of_log(one), name
        )
    wrong = {metric: error for metric, error in one.metrics.items() if not error <= bound}
    if wrong and not one.gradients:
        text = ", ".join(f"{metric} is off by {error:.1e}" for metric, error in wrong.items()) + f" on {name[0]}"
        yield StepFinding(
            "metric", axis, tuple(wrong), None, text, "it is not reduced over every axis of the layout", name
        )


def _of_norm(one: Compared, axis: str, bound: float, name: tuple[str]) -> Iterator[StepFinding]:
    if not one.norm <= bound:
        weights, cause = one.unmarked or one.overmarked, "no single weight explains it"
        text = f"the norm that clips is × {one.norm_factor:.6g} on {name[0]}, though every gradient is right"
        if one.unmarked:
            text = (
                f"{_listed(one.unmarked, 0)}: cut over tensor ranks and not marked as cut; the norm that clips is × "
                f"{one.norm_factor:.6g} on {name[0]}"
            )
            cause = (
                "attention sinks that Megatron does not mark (Megatron-LM #7530); parallel_rl.megatron.wrap_model marks them"
                if all(weight.endswith("softmax_offset") for weight in one.unmarked)
                else "Megatron counts an unmarked weight on tensor rank 0 alone; call "
                "tensor_parallel.set_tensor_model_parallel_attributes(weight, True, dim, 1) where the weight is made"
            )
        elif one.overmarked:
            text = f"{_listed(one.overmarked, 0)}: whole on each tensor rank and marked as cut; {text}"
            cause = "Megatron counts it once for each tensor rank; leave tensor_model_parallel unset"
        elif one.counted is not None:
            weights = (one.counted[0],)
            times = f"{one.counted[1]:g} times in the norm that clips"
            text = f"{one.counted[0]} is counted {times}, × {one.norm_factor:.6g} on {name[0]}"
            cause = "its marks (shared, shared_embedding, tensor_model_parallel, allreduce) do not say how it is held"
        yield StepFinding("norm", axis, weights, one.norm_factor, text, cause, name)
    elif not one.weights <= bound:
        text = f"weights move × {one.moved:.6g} on {name[0]}, though gradients and norm are right"
        yield StepFinding(
            "weights", axis, (), one.moved, text, "the optimizer's step: replicas or shards do not step alike", name
        )


def _groups(errors: Sequence[WeightError]) -> list[list[WeightError]]:
    """Group the weights for one sentence each: left in parts, scaled by the same factor, all others."""
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


def _of_log(one: Compared) -> str:
    if not one.layout.per_token:
        return "a mean of what each micro-batch or shard reports"
    return "a sum or a count that is not reduced over every axis of the layout"


def _of_error(one: Compared) -> str:
    if one.hung:
        return "one process runs the same step: a rank loops, or waits in a collective that another rank does not enter"
    if "differ in the model's weights" in one.error:
        return (
            "a weight with other values on these ranks is marked as one that they share; experts need allreduce = False"
            if one.layout.ep > 1
            else "a weight that these ranks share is drawn or changed by rank"
        )
    if one.layout.world == 1:
        return "one process runs the step on padded rows in one micro-batch; other rows or settings break it"
    if one.error.startswith("every rank"):
        return (
            "one process runs the same step: what the layout changes on all ranks, such as sizes or shapes, breaks it"
        )
    return (
        "one process runs the same step: what this rank alone has, such as its stage, its shard or its rows, breaks it"
    )
