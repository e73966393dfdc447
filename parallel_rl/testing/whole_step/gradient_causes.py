"""Find the nearest known cause of a group of wrong gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallel_rl.testing.whole_step.compare import Compared, WeightError
from parallel_rl.testing.whole_step.layouts import StepLayout

_NEAR = 1e-3
_LOG = 0.1  # of the loss that log TP explains
_NO_BACKWARD = (
    "the forward pass is right and the backward is not: a collective without its backward, or one with a wrong one"
)


@dataclass(frozen=True)
class Facts:
    """Facts about the checked step."""

    script: bool  # the step is the user's
    heads: bool  # multi-token prediction heads
    experts: bool  # the model has experts
    number: int  # trainable weights of the whole model
    frozen: bool  # some weights do not train
    random: str  # difference between two one-process runs with different seeds; empty if they agree


def gradient_cause(compared: Compared, group: Sequence[WeightError], axis: str, facts: Facts) -> str:
    """Name the nearest known cause of a group of wrong gradients that `axis` brings."""
    layout, first, names = compared.layout, group[0], [error.name for error in compared.gradients]
    if math.isinf(first.error) and first.factor is None:
        return "requires_grad differs between layouts; freeze by the name that a one-process model gives, not by place or rank"
    alike = len(group) >= facts.number and first.factor is not None and not (first.missing or first.weighed)
    if facts.script and layout.tp > 1 and abs(compared.loss_shift - math.log(layout.tp)) < _LOG:
        return (
            "the loss is too large by log TP: logits are gathered before the loss (parallel_output = False); build the model "
            "with parallel_output = True"
        )
    if alike and first.factor is not None and (sizes := _of_sizes(first.factor, layout, axis)):
        return f"the whole loss is {sizes}"
    sizes = "" if first.factor is None else _of_sizes(first.factor, layout, axis)
    if first.missing or first.by_rank or "expert ranks" in sizes:
        return sizes if "expert ranks" in sizes else _of_parts(first, layout)
    if all(".experts." in name for name in names):
        return (
            "gradients of experts: a dispatcher drops tokens or gradients, or experts are reduced over ranks that hold others "
            "(allreduce = False and the expert data parallel group belong to them)"
        )
    if (
        facts.experts
        and layout.balance
        and compared.loss <= _NEAR
        and ".router." in max(compared.gradients, key=lambda error: error.error).name
    ):
        return (
            "the routers' own losses are scaled by a rank's tokens (Megatron-LM #7481, #5996; before 0.19 by 1/(TP·CP) with "
            "calculate_per_token_loss), or their mask is another group's; forward_backward scales them"
        )
    if facts.script and facts.heads and compared.loss <= _NEAR and any(name.startswith("mtp.") for name in names):
        return (
            "the heads' loss is divided by the tokens of a micro-batch or shard (Megatron-LM #7498, #3159); divide by the "
            "step's, as forward_backward(mtp_loss=) does"
        )
    if first.weighed is not None:
        return _of_counts(compared, first.weighed.factor, first.weighed.local)
    if alike and abs(first.factor or 0.0) > _NEAR:
        return "every gradient has one factor, which is no size of the layout: its loss is scaled on this layout alone"
    if facts.script and len(names) >= 0.9 * facts.number and not compared.loss <= _NEAR:
        return "other tokens carry loss than on one process: a mask or labels of another rank's part of the rows"
    return _of_factor(compared, first, axis, facts)


def _of_parts(first: WeightError, layout: StepLayout) -> str:
    """Name the cause of a gradient that ranks hold in parts, or that some ranks lost."""
    if first.by_rank:
        return "the gradient is lost on some of the ranks that hold the weight: a hook, a detached tensor, a rank's own branch"
    if first.missing == ("pipeline",):
        return (
            "the first and the last stage hold a tied embedding, and its gradient is not summed over them; call "
            "finalize_model_grads, which sums it over the embedding group"
        )
    if first.missing == ("tensor",) and not layout.sp:
        return (
            "a weight that tensor ranks hold whole sees each rank's own heads or columns; sum its gradient over tensor ranks, "
            "or put copy_to_tensor_model_parallel_region before it"
        )
    if first.missing == ("tensor",):
        return (
            "a weight that tensor ranks hold whole sees a part of the sequence on each; set sequence_parallel = True on it, so "
            "that finalize_model_grads sums it"
        )
    if "context" in first.missing:
        return "gradients are not summed over context ranks; reduce over get_data_parallel_group(with_context_parallel=True)"
    return f"gradients are not summed over {' × '.join(first.missing)} ranks"


def _of_sizes(factor: float, layout: StepLayout, axis: str) -> str:
    """Describe a factor that is a product of layout sizes or its reciprocal, `axis` first; else return ""."""
    sizes = {
        "tensor ranks": layout.tp,
        "context ranks": layout.cp,
        "data ranks": layout.dp,
        "micro-batches": layout.micro // layout.dp,
        "pipeline ranks": layout.pp,
        "expert ranks": layout.ep,
    }
    named = [(name, size) for name, size in sizes.items() if size > 1]
    for number in range(1, len(named) + 1):
        several = list(itertools.combinations(named, number))
        several.sort(key=lambda chosen: -sum(name.partition(" ")[0] in axis for name, _ in chosen))
        texts = {" × ".join(f"{size} {name}" for name, size in chosen): chosen for chosen in several}
        products = {text: math.prod(size for _, size in chosen) for text, chosen in texts.items()}
        if fits := [text for text, product in products.items() if abs(factor / product - 1) < _NEAR]:
            return f"counted once for each of {' or '.join(fits)}"
        if fits := [text for text, product in products.items() if abs(factor * product - 1) < _NEAR]:
            return f"averaged over {' or '.join(fits)}, whose parts add up"
    return ""


def _of_counts(compared: Compared, factor: float, local: bool) -> str:
    """Name the cause of tokens whose weight is wrong."""
    if local and compared.layout.cp > 1 and not compared.layout.per_token:
        return (
            "a callback of three values without calculate_per_token_loss is divided by the tokens of each shard (Megatron-LM "
            "#7513); set calculate_per_token_loss, or return two values scaled by the step's counts"
        )
    if local and not compared.layout.per_token:
        return (
            "an average of micro-batches' averages (Megatron-LM #4590): tokens weigh by how few they came with; set "
            "calculate_per_token_loss and return (sum, tokens, log)"
        )
    if local:
        return "a local count: what a micro-batch or shard holds divides its loss; divide by the counts of the step"
    if abs(factor) < _NEAR:
        return "the tokens of this part do not train: its loss or its backward is left out"
    if round(factor) > 1 and abs(factor - round(factor)) < _NEAR:
        return f"this part of the step is added {round(factor)} times: it is run, or its gradient is summed, more than once"
    return "this part of the step has a factor of its own: a weight or a mean that other ranks and micro-batches lack"


def _of_factor(compared: Compared, first: WeightError, axis: str, facts: Facts) -> str:
    """Name the cause of one factor, or of an error without a single factor."""
    layout, factor = compared.layout, first.factor
    if factor is not None and abs(factor) < _NEAR and layout.recompute and facts.frozen:
        return (
            "full recomputation drops the gradients of layers whose input needs none, as behind a frozen embedding; have its "
            "output need one: model.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())"
        )
    if factor is not None and abs(factor) < _NEAR:
        return "the gradient is lost: a detached tensor, a frozen weight, or a reduction that leaves it out"
    if factor is not None and (sizes := _of_sizes(factor, layout, axis)):
        return sizes
    if not compared.loss <= _NEAR and axis == "recompute":
        return (
            "the forward pass differs under recomputation, which runs it without gradients first: a branch on "
            "torch.is_grad_enabled(), or a state that each run changes"
        )
    if not compared.loss <= _NEAR:
        return "the forward pass differs on this layout: positions, a mask or a sum that do not suit a rank's part"
    return _NO_BACKWARD
