"""Loss callback for Megatron's schedules; the only place that undoes Megatron's scaling, of losses and of logged metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.groups import ParallelGroups
from parallel_rl.labels import with_labels
from parallel_rl.losses.core.call import LossCall, LossFunction
from parallel_rl.losses.core.checks import check_counts, check_statistics
from parallel_rl.losses.nll import NLLLoss
from parallel_rl.megatron.auxiliary import RoutedTokens, check_auxiliary_losses, has_auxiliary_loss
from parallel_rl.megatron.callbacks import callbacks_of, postponed
from parallel_rl.megatron.cpu import plain_torch
from parallel_rl.megatron.forward import is_last_stage
from parallel_rl.megatron.lm_head import FusedHead, add_mtp_loss, split_heads
from parallel_rl.megatron.loop_checks import (
    check_normalised,
    check_owner,
    is_checked,
    warn,
    warn_of_factor,
    warn_of_left_gradient,
    watch_optimizers,
)
from parallel_rl.megatron.prepare import refuse_name_and_class
from parallel_rl.megatron.row_checks import (
    check_ids,
    warn_of_cut,
    warn_of_padding,
    warn_of_precision,
    warn_of_prompts,
    warn_of_shifted_mask,
)
from parallel_rl.megatron.settings import check_finalizing, check_heads, check_settings, check_sizes
from parallel_rl.metrics import Metrics
from parallel_rl.packing import SequencePackingLossWrapper
from parallel_rl.vocab.linear.lm_head import LMHeadInput

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class LossReport(TypedDict):
    """Result of a micro-batch on the last stage: this rank's local loss, and its metrics."""

    loss: Tensor
    metrics: Metrics


LossResult = tuple[Tensor, LossReport] | tuple[Tensor, Tensor, LossReport]


def megatron_loss_func(
    loss_fn: Callable[..., tuple[Tensor, Metrics]],
    data: Mapping[str, Tensor] | None,
    global_valid_seqs: Tensor,
    global_valid_toks: Tensor,
    *,
    config: TransformerConfig,
    num_microbatches: int,
    ddp: bool = True,
    groups: ParallelGroups | None = None,
    head: Callable[[Tensor], Tensor | LMHeadInput] | None = None,
    routed: RoutedTokens | None = None,
    mtp_loss: NLLLoss | None = None,
    allow_dropout: bool = False,
) -> Callable[[Tensor], LossResult]:
    """Make the loss callback that a forward step returns to `get_forward_backward_func`, under the law.

    The optimizer's gradients are Σ over data and context ranks and micro-batches of ∇(local loss) = ∇L, for any number of
    micro-batches and ranks, with or without `calculate_per_token_loss`:

    - calculate_per_token_loss: (L, 0, report); nothing is scaled.
    - calculate_per_token_loss with auxiliary losses of experts: (L·R, r, report) with Σr = R, the tokens that routers read.
    Megatron multiplies an auxiliary loss by those of the micro-batch and divides by Σr in `finalize_model_grads`, so
    micro-batches weigh by their tokens; otherwise all weigh the same.
    - otherwise: (L·M·DP, report) under Megatron's DDP, (L·M/CP, report) without; the schedule multiplies by CP/M and DDP by
    1/(DP·CP).

    >>> counts = count_valid(data)
    >>> loss_func = megatron_loss_func(NLLLoss(), data, *counts, config=config, num_microbatches=1)
    >>> loss_func(torch.zeros(2, 4, 8))[-1]["loss"]  # log 8
    tensor(2.0794)

    Each call checks settings, shapes and dtypes on the host. The first three steps of a config (all with
    `set_validation("always")`) also check values, exchange faults within a pipeline stage, and compare the counts with the
    step's data and, under expert parallelism, data ranks' numbers of micro-batches; the host waits for this. In backward they
    warn of a gradient scaled around the callback. Before gradients are finalized, in a function around your
    `config.finalize_model_grads_func`, they compare weights, wrapper and the rows of all stages on all ranks. Pipeline stages
    raise a fault of the first micro-batch once as many have begun as stages follow, and any other before gradients are
    finalized. Under `torch.no_grad()` only the call itself is checked. Before each step call `model.zero_grad_buffer()` and
    `optimizer.zero_grad()`, since DDP adds what is left in `grad` to the next gradient; the second and third step warn of it.

    Args:
        loss_fn: any function with the call of `LossFn`; it returns the local loss and its metrics. If it needs statistics
            of the step, pass `functools.partial(loss_fn, statistics=...)`.
        data: whole, token-aligned tensors of this micro-batch, the same on each pipeline stage; None on a stage without data.
        global_valid_seqs, global_valid_toks: from `count_valid` over all micro-batches of the step and all data ranks.
        config: the model's config. num_microbatches: M of the schedule.
        ddp: the model is in Megatron's DDP with `finalize_model_grads_func` set. False: gradients are summed over data ×
            context by `sum_gradients` or by you.
        head: from `fuse_head`, if the model has one. allow_dropout, groups: see `forward_backward`.
        routed: this micro-batch's of `count_routed`; needed with auxiliary losses under calculate_per_token_loss.
        mtp_loss: trains the heads of multi-token prediction, see `forward_backward`; the model's output is then that of
            `forward_logits(model, inputs, mtp=True)`. None: they do not train.

    Returns:
        logits [B, S/cp, V/tp] → what the schedule expects. Its report holds the unscaled local loss.

    Raises:
        ValueError: num_microbatches below 1; `ddp` that contradicts `config.finalize_model_grads_func`; dropout with a loss
            that reads recorded log-probs; a field that is missing or of a wrong shape, dtype or value; missing statistics;
            counts of other micro-batches than the step's; auxiliary losses without DDP, or without a needed `routed`; see
            `check_auxiliary_losses`.
    """
    where = groups or ParallelGroups.from_megatron()
    counts = (global_valid_seqs, global_valid_toks)
    inner = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    statistics = loss_fn.keywords.get("statistics") if isinstance(loss_fn, partial) else None
    reads = inner.requirements.reads if isinstance(inner, LossFunction) else None
    trains = torch.is_grad_enabled()  # Megatron's evaluation runs without gradients

    def check(first: bool) -> None:
        refuse_name_and_class(inner)
        check_sizes(config)
        check_scaling(config, num_microbatches, ddp, routed)
        check_auxiliary_losses(config, where.cp_size, by_megatron=True)
        check_heads(config, mtp_loss is not None)
        if head is not None and not callable(head):
            raise ValueError(f"head must be what `fuse_head` returned for this model, got {type(head).__name__}")
        needs = inner.requirements if isinstance(inner, LossFunction) else None
        if trains:
            check_finalizing(config, ddp)
            check_settings(config, needs, allow_dropout=allow_dropout, trains_heads=mtp_loss is not None, first=first)
        if first and where.cp_size > 1:
            warn_of_cut(config, inner)
        if needs is not None:
            check_statistics(type(inner).__name__, needs, statistics)
        if data is None and is_last_stage():
            raise ValueError("data is None on the last pipeline stage, which computes the loss")
        if isinstance(inner, LossFunction) and data is not None:
            if not isinstance(data, Mapping):
                raise ValueError(f"data must be the dict of this micro-batch's tensors, got {type(data).__name__}")
            labelled = with_labels(data)
            inner.check_inputs(labelled, values=checked)
            if checked:
                check_counts(*counts, labelled)
                if "input_ids" in data:  # input_ids of the model; pre-shifted labels do not replace them
                    check_ids(data, None, inner)
            if first and dist.get_rank() == 0:
                warn_of_prompts([labelled], inner.requirements)
                warn_of_shifted_mask([labelled], inner.requirements)
                warn_of_precision([labelled], inner.requirements)

    checked = trains and is_checked(callbacks_of(config).steps)
    looks = False
    if ddp:
        watch_optimizers()
    if trains:
        looks = callbacks_of(config).add(
            check, data, counts, num_microbatches, where,
            config=config, ddp=ddp, loss_fn=inner, head=head, statistics=statistics,
        )  # fmt: skip
    else:
        check(False)

    def share(output: Tensor) -> tuple[Tensor, Metrics]:
        _check_output(output)
        if checked and isinstance(head, FusedHead):
            check_owner(output, head.model)
        elif checked and where.tp_size > 1 and output.dim() > 2 and reads != "scalar":
            check_normalised(output)
        if looks and ddp:
            warn_of_left_gradient(output)
        if head is None and where.tp_rank == where.cp_rank == where.dp_rank == 0:
            warn_of_padding(loss_fn, output.shape[-1] * where.tp_size, where.tp_size)
        assert data is not None, "only the last stage calls this"
        parts = where.tp_size if config.sequence_parallel and head is None else 1
        outputs = [output] if mtp_loss is None else split_heads(output, config.mtp_num_layers, parts)
        main, *heads = [output if head is None else head(output) for output in outputs]
        result: Any = loss_fn(  # of any function
            main,
            data,
            *counts,
            vocab_parallel_rank=where.tp_rank,
            vocab_parallel_group=where.tensor,
            context_parallel_group=where.context,
        )
        if not (isinstance(result, tuple) and len(result) == 2):
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            raise ValueError(f"{name} returned {type(result).__name__}; a loss returns (its local loss, its Metrics)")
        if mtp_loss is None:
            return result[0], result[1]
        call = LossCall.of(main, data, counts, where.tp_rank, (where.tensor, where.context))
        packed = inner.packed_sequences if isinstance(inner, SequencePackingLossWrapper) else None
        call = replace(call, packed_sequences=packed)
        return add_mtp_loss(result, mtp_loss, call, heads, config.mtp_loss_scaling_factor)

    scaled = scaled_loss_func(
        partial(postponed, share, callbacks_of(config).postpone) if trains else share,
        config=config,
        num_microbatches=num_microbatches,
        ddp=ddp,
        groups=where,
        routed=routed,
    )

    calls = iter(range(2))

    def watched(output: Tensor) -> LossResult:
        if next(calls, None) == 1:
            warn("a callback was called twice: it has the data of one micro-batch, so make one in each forward step")
        result = scaled(output)
        warn_of_factor(result[0], 1 if len(result) > 2 else where.cp_size / num_microbatches, config)
        return result

    return watched if checked else scaled


def check_scaling(
    config: TransformerConfig, num_microbatches: int, ddp: bool, routed: RoutedTokens | None = None
) -> None:
    """Raise ValueError for num_microbatches below 1, or auxiliary losses without DDP or a needed `routed`."""
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches = {num_microbatches} must be at least 1")
    auxiliary = has_auxiliary_loss(config)
    if auxiliary and not ddp:
        raise ValueError(
            "auxiliary losses (of experts) need Megatron's DDP (ddp=True), which takes part in their scaling"
        )
    if auxiliary and config.calculate_per_token_loss and routed is None:
        raise ValueError(
            "routed is missing: with calculate_per_token_loss = True auxiliary losses (of experts) are divided by the tokens "
            "that routers see; pass this micro-batch's of `count_routed`"
        )


def _check_output(output: object) -> None:
    if not isinstance(output, Tensor):
        raise ValueError(f"the model's output is a {type(output).__name__}; return its logits from the forward step")
    if output.dim() == 2:
        raise ValueError(
            f"the model's output is {list(output.shape)}, the losses that GPTModel returns if it is given labels; call it "
            "without labels, so that it returns logits"
        )


def scaled_loss_func(
    share: Callable[[Tensor], tuple[Tensor, Metrics]],
    *,
    config: TransformerConfig,
    num_microbatches: int,
    ddp: bool,
    groups: ParallelGroups,
    routed: RoutedTokens | None = None,
) -> Callable[[Tensor], LossResult]:
    """Make `megatron_loss_func`'s callback from a function: output → this rank's local loss and metrics."""
    auxiliary = has_auxiliary_loss(config)  # multi-token prediction is in the local loss, see `add_mtp_loss`

    def loss_func(output: Tensor) -> LossResult:
        with plain_torch():
            loss, metrics = share(output)
        # the schedule divides in place: the report must not share memory
        report = LossReport(loss=loss.detach().clone(), metrics=metrics)
        if not config.calculate_per_token_loss:
            return loss * (num_microbatches * groups.dp_size if ddp else num_microbatches / groups.cp_size), report
        if not auxiliary or routed is None:
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), report
        # finalize_model_grads multiplies by 1.0 / Σr in torch's default dtype: dividing by the same number is exact
        scaling = (1.0 / routed.step.to(torch.int)).to(loss)
        # on one context rank only: Megatron sums over data × context, and the ranks' parts of an auxiliary loss add up
        here = loss.new_full((), routed.here if groups.cp_rank == 0 else 0, dtype=torch.int)
        return loss / scaling, here, report

    return loss_func


_SUMMED = ("share", "count", "ratio")


def numerator_denominator(
    metrics: Metrics, num_microbatches: int, *, groups: ParallelGroups | None = None
) -> dict[str, Tensor]:
    """Turn a micro-batch's metrics into a loss callback's dict for `train_step`: name → [2] float64.

        logged = Σ numerator / Σ denominator    over micro-batches, data and context ranks

    `train_step` under `pretrain()` sums pairs and divides, so the log has the global batch's numbers: denominators of a sum
    over the step add up to 1. Extrema and ratios of squares have no such pairs and are left out (see `reduce_metrics`).

    >>> counts = count_valid(data)
    >>> loss_func = megatron_loss_func(NLLLoss(), data, *counts, config=config, num_microbatches=1)
    >>> *_, report = loss_func(torch.zeros(2, 4, 8))
    >>> numerator_denominator(report["metrics"], num_microbatches=1)["loss"]  # log 8
    tensor([2.0794, 1.0000], dtype=torch.float64)

    Args:
        metrics: `report["metrics"]` of the callback that `megatron_loss_func` makes.
        num_microbatches: of the step, the same on every data rank; at least 1, else ValueError.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches = {num_microbatches} must be at least 1")
    where = groups or ParallelGroups.from_megatron()
    parts = num_microbatches * where.dp_size * where.cp_size
    pairs = {}
    for name in metrics:
        part = metrics.parts(name)
        if part.kind in _SUMMED:
            value = part.value.to(torch.float64)
            denominator = torch.full_like(value, 1 / parts) if part.denominator is None else part.denominator.to(value)
            pairs[name] = torch.stack([value, denominator])
    return pairs
