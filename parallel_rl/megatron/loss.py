"""Loss callback for Megatron's schedules; the only place that undoes Megatron's loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from parallel_rl.groups import ParallelGroups
from parallel_rl.megatron.auxiliary import RoutedTokens, check_auxiliary_losses, has_auxiliary_loss
from parallel_rl.megatron.cpu import plain_torch
from parallel_rl.megatron.prepare import warn_of_padding
from parallel_rl.metrics import Metrics
from parallel_rl.vocab.linear.lm_head import LMHeadInput

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class LossReport(TypedDict):
    """Result of one micro-batch, on the last stage: this rank's share of the loss, and the metrics for `reduce_metrics`."""

    loss: Tensor
    metrics: Metrics


LossResult = tuple[Tensor, LossReport] | tuple[Tensor, Tensor, LossReport]


def megatron_loss_func(
    loss_fn: Callable[..., tuple[Tensor, Metrics]],
    data: Mapping[str, Tensor],
    global_valid_seqs: Tensor,
    global_valid_toks: Tensor,
    *,
    config: TransformerConfig,
    num_microbatches: int,
    ddp: bool = True,
    groups: ParallelGroups | None = None,
    head: Callable[[Tensor], Tensor | LMHeadInput] | None = None,
    routed: RoutedTokens | None = None,
) -> Callable[[Tensor], LossResult]:
    """Make the loss callback that a forward step returns to `get_forward_backward_func`, such that the law holds.

    The gradients that the optimizer sees are Σ over data and context ranks and micro-batches of ∇share = ∇L, whatever
    the number of micro-batches and ranks and whether `calculate_per_token_loss` is set:

    - calculate_per_token_loss: (L, 0, report); nothing is scaled.
    - calculate_per_token_loss with auxiliary losses of experts: (L·R, r, report) with Σr = R, the tokens that routers see:
      Megatron multiplies an auxiliary loss by those of the micro-batch and relies on the division by Σr in
      `finalize_model_grads`. Each micro-batch's auxiliary loss so weighs as its tokens; otherwise each weighs the same.
    - otherwise: (L·M·DP, report) under Megatron's DDP, (L·M/CP, report) without; the schedule multiplies by CP/M and
      DDP by 1/(DP·CP).

    >>> counts = count_valid(data)
    >>> loss_func = megatron_loss_func(NLLLoss(), data, *counts, config=config, num_microbatches=1)
    >>> loss_func(torch.zeros(2, 4, 8))[-1]["loss"]  # log 8
    tensor(2.0794)

    Args:
        loss_fn: any function with the call of `LossFn`; it returns this rank's share and its metrics. One that needs
            statistics of the step comes as `functools.partial(loss_fn, statistics=...)`.
        data: the whole, token-aligned tensors of this micro-batch.
        global_valid_seqs, global_valid_toks: from `count_valid` over all micro-batches of the step and all data ranks.
        config: the model's config; `calculate_per_token_loss` and the experts are read from it.
        num_microbatches: M of the schedule.
        ddp: whether the model is wrapped in Megatron's DDP with `finalize_model_grads_func` set. False: the gradients
            are summed over data × context by `sum_gradients` or by the caller.
        groups: defaults to `ParallelGroups.from_megatron()`.
        head: of the model, where `fuse_head` installed one.
        routed: this micro-batch's of `count_routed`; needed with auxiliary losses under calculate_per_token_loss.

    Returns:
        logits [B, S/cp, V/tp] → what the schedule expects. Its report holds the unscaled share.

    Raises:
        ValueError: num_microbatches below 1; auxiliary losses without DDP, or without `routed` where it is needed; see
            `check_auxiliary_losses`.
    """
    where = groups or ParallelGroups.from_megatron()

    def share(output: Tensor) -> tuple[Tensor, Metrics]:
        if head is None and where.tp_rank == where.cp_rank == where.dp_rank == 0:
            warn_of_padding(loss_fn, output.shape[-1] * where.tp_size, where.tp_size)
        return loss_fn(
            output if head is None else head(output),
            data,
            global_valid_seqs,
            global_valid_toks,
            vocab_parallel_rank=where.tp_rank,
            vocab_parallel_group=where.tensor,
            context_parallel_group=where.context,
        )

    loss_func = scaled_loss_func(
        share, config=config, num_microbatches=num_microbatches, ddp=ddp, groups=where, routed=routed
    )
    check_auxiliary_losses(config, where.cp_size, by_megatron=True)
    return loss_func


def scaled_loss_func(
    share: Callable[[Tensor], tuple[Tensor, Metrics]],
    *,
    config: TransformerConfig,
    num_microbatches: int,
    ddp: bool,
    groups: ParallelGroups,
    routed: RoutedTokens | None = None,
) -> Callable[[Tensor], LossResult]:
    """`megatron_loss_func` for any function from the model's output to this rank's share of the loss and its metrics."""
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches = {num_microbatches} must be at least 1")
    auxiliary = has_auxiliary_loss(config)  # multi-token prediction is in the share, see `mtp_share`
    if auxiliary and not ddp:
        raise ValueError(
            "auxiliary losses (of experts) need Megatron's DDP (ddp=True), which takes part in their scaling"
        )
    if auxiliary and config.calculate_per_token_loss and routed is None:
        raise ValueError(
            "routed is missing: with calculate_per_token_loss = True auxiliary losses (of experts) are divided by the tokens "
            "that routers see; pass this micro-batch's of `count_routed`"
        )

    def loss_func(output: Tensor) -> LossResult:
        with plain_torch():
            loss, metrics = share(output)
        # The schedule divides in place, so what is reported must not share memory with what is returned.
        report = LossReport(loss=loss.detach().clone(), metrics=metrics)
        if not config.calculate_per_token_loss:
            return loss * (num_microbatches * groups.dp_size if ddp else num_microbatches / groups.cp_size), report
        if not auxiliary or routed is None:
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), report
        # finalize_model_grads multiplies by 1.0 / Σr, rounded to torch's default dtype; dividing by the same number
        # loses nothing.
        scaling = (1.0 / routed.step.to(torch.int)).to(loss)
        # Counted on one context rank only: Megatron sums over data × context, and the ranks' parts of an auxiliary loss, each
        # times the same number, add up to all of it times that number.
        here = loss.new_full((), routed.here if groups.cp_rank == 0 else 0, dtype=torch.int)
        return loss / scaling, here, report

    return loss_func
