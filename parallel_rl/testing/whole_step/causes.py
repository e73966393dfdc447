"""Findings of a layout's errors: they name weights, layout, factor and the nearest known cause."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parallel_rl.testing.whole_step.compare import Compared, WeightError

_SHOWN = 3  # weights that a finding lists
_NEAR = 1e-3
_LOG = 0.1  # of the loss that log TP explains


@dataclass(frozen=True)
class StepFinding:
    """One thing that differs from one process.

    Attributes:
        what: gradient, norm, loss, metric, weights, error.
        axis: of the layout that brings it, such as "context".
        weights: by name, those concerned; empty where it is no matter of single weights.
        factor: by which it is too large; None if no one factor explains it.
        text: numbers, on the first layout that shows it. cause: the nearest known one, and its cure.
        layouts: on which it was seen.
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


@dataclass(frozen=True)
class Facts:
    """Facts about the step that is checked.

    Attributes:
        script: the step is the user's. heads: of multi-token prediction. experts: the model has some.
        number: of weights that train in the whole model. frozen: some do not train.
    """

    script: bool
    heads: bool
    experts: bool
    number: int
    frozen: bool


def diagnose(seen: Sequence[Compared], bound: float, facts: Facts) -> list[StepFinding]:
    """Find what is wrong, the layouts with fewest axes first."""
    broken = sorted((one for one in seen if one.broken(bound)), key=lambda one: len(one.layout.axes))
    right = [one for one in seen if not one.error and not one.broken(bound)]
    findings: list[StepFinding] = []
    for one in broken:
        axes = _blamed(one, right)
        axis = " × ".join(sorted(axes)) or "one process"
        for finding in _of_layout(one, axis, bound, facts):
            _join(findings, finding)
    return findings


def _blamed(one: Compared, right: Sequence[Compared]) -> frozenset[str]:
    """Return the axes of a broken layout without those of right ones, unless nothing is left."""
    axes = one.layout.axes
    within = [other.layout.axes for other in right if other.layout.axes < axes]
    left = axes - max(within, key=len, default=frozenset())
    return left - frozenset().union(*(other.layout.axes for other in right)) or left


def _join(findings: list[StepFinding], new: StepFinding) -> None:
    for i, known in enumerate(findings):
        if (known.what, known.cause) == (new.what, new.cause) and (
            known.weights == new.weights or len(new.weights) > _SHOWN
        ):
            findings[i] = replace(known, layouts=(*known.layouts, *new.layouts))
            return
    findings.append(new)


def _of_layout(one: Compared, axis: str, bound: float, facts: Facts) -> Iterator[StepFinding]:
    name = (one.layout.name,)
    if one.error:
        yield StepFinding("error", axis, (), None, f"{one.error} on {name[0]}", _of_error(one), name)
        return
    for group in _groups(one.gradients):
        names = tuple(weight.name for weight in group)
        factor, what = group[0].factor, group[0].text
        if one.weighed and factor is None:
            factor, what = one.weighed_factor, one.weighed
        cause = _of_gradient(one, group, facts)
        yield StepFinding(
            "gradient", axis, names, factor, f"{_listed(names, facts.number)}: {what} on {name[0]}", cause, name
        )
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
    """Put together the weights that one sentence describes: those left in parts, those with one factor, all others."""
    groups: dict[object, list[WeightError]] = defaultdict(list)
    for error in errors:
        if error.missing or error.factor is not None:
            key: object = (error.missing, round(error.factor or 0.0, 4))
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


def _of_gradient(one: Compared, group: Sequence[WeightError], facts: Facts) -> str:
    """Name the nearest known cause of a group of wrong gradients."""
    layout, first, names = one.layout, group[0], [error.name for error in one.gradients]
    if math.isinf(first.error) and first.factor is None:
        return "requires_grad differs between layouts; freeze by the name that a one-process model gives, not by place or rank"
    if first.missing == ("tensor",):
        return (
            "a weight that tensor ranks hold whole sees a part of the sequence on each; set sequence_parallel = True on it, so "
            "that finalize_model_grads sums it"
        )
    if "context" in first.missing:
        return "gradients are not summed over context ranks; reduce over get_data_parallel_group(with_context_parallel=True)"
    if first.missing:
        return f"gradients are not summed over {' × '.join(first.missing)} ranks"
    if all(".experts." in name for name in names):
        return (
            "gradients of experts: a dispatcher drops tokens or gradients, or experts are reduced over ranks that hold others "
            "(allreduce = False and the expert data parallel group belong to them)"
        )
    if facts.script and layout.tp > 1 and abs(one.loss_shift - math.log(layout.tp)) < _LOG:
        return (
            "the loss is too large by log TP: logits are gathered before the loss (parallel_output = False); build the model "
            "with parallel_output = True"
        )
    if facts.experts and layout.balance and ".router." in max(one.gradients, key=lambda error: error.error).name:
        return (
            "the routers' own losses are scaled by a rank's tokens (Megatron-LM #7481, #5996; before 0.19 by 1/(TP·CP) with "
            "calculate_per_token_loss), or their mask is another group's; forward_backward scales them"
        )
    if facts.script and facts.heads and one.loss <= _NEAR and any(name.startswith("mtp.") for name in names):
        return (
            "the heads' loss is divided by the tokens of a micro-batch or shard (Megatron-LM #7498, #3159); divide by the "
            "step's, as forward_backward(mtp_loss=) does"
        )
    if len(names) >= 0.9 * facts.number and (one.weighed or facts.script):
        return _of_counts(one)
    return _of_factor(one, first, facts)


def _of_counts(one: Compared) -> str:
    """Name the cause of tokens that weigh too much or too little."""
    if one.weighed and one.layout.cp > 1 and not one.layout.per_token:
        return (
            "a callback of three values without calculate_per_token_loss is divided by the tokens of each shard (Megatron-LM "
            "#7513); set calculate_per_token_loss, or return two values scaled by the step's counts"
        )
    if one.weighed and not one.layout.per_token:
        return (
            "an average of micro-batches' averages (Megatron-LM #4590): tokens weigh by how few they came with; set "
            "calculate_per_token_loss and return (sum, tokens, log)"
        )
    if one.weighed:
        return "a local count: what a micro-batch or shard holds divides its loss; divide by the counts of the step"
    if not one.loss <= _NEAR:
        return "other tokens carry loss than on one process: a mask or labels of another rank's part of the rows"
    return (
        "the forward pass is right and the backward is not: a collective without its backward, or one with a wrong one"
    )


def _of_factor(one: Compared, first: WeightError, facts: Facts) -> str:
    """Name the cause of one factor, or of an error that has none."""
    layout, factor = one.layout, first.factor
    if factor is not None and abs(factor) < _NEAR and layout.recompute and facts.frozen:
        return (
            "full recomputation drops the gradients of layers whose input needs none, as behind a frozen embedding; have its "
            "output need one: model.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())"
        )
    if factor is not None and abs(factor) < _NEAR:
        return "the gradient is lost: a detached tensor, a frozen weight, or a reduction that leaves it out"
    sizes = {"tensor": layout.tp, "context": layout.cp, "data": layout.dp, "pipeline": layout.pp}
    for axis, size in sizes.items():
        if factor is not None and size > 1 and abs(factor * size - 1) < _NEAR:
            return f"averaged over {size} {axis} ranks, whose parts add up"
        if factor is not None and size > 1 and abs(factor / size - 1) < _NEAR:
            return f"counted once for each of {size} {axis} ranks"
    if not one.loss <= _NEAR:
        return "the forward pass differs on this layout: positions, a mask or a sum that do not suit a rank's part"
    return (
        "the forward pass is right and the backward is not: a collective without its backward, or one with a wrong one"
    )


def _of_log(one: Compared) -> str:
    if not one.layout.per_token:
        return "a mean of what each micro-batch or shard reports"
    return "a sum or a count that is not reduced over every axis of the layout"


def _of_error(one: Compared) -> str:
    if "gave no answer" in one.error:
        return "one process runs the same step: a rank loops, or waits in a collective that another rank does not enter"
    if one.layout.world == 1:
        return "one process runs the step on padded rows in one micro-batch; other rows or settings break it"
    if one.error.startswith("every rank"):
        return "one process runs the same step: the sizes of a rank's part break it"
    return (
        "one process runs the same step: what this rank alone has, such as its stage, its shard or its rows, breaks it"
    )
