"""Whole logits from hidden states and the LM head, for losses that read the whole distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.groups import all_gather_start, group_size, sum_start
from parallel_rl.vocab.linear.lm_head import LMHeadInput

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup


def whole_logits(head: LMHeadInput, keep: Tensor, group: ProcessGroup | None) -> Tensor:
    """Project to logits [B, S/cp, V/tp] in the dtype of the operands, with gradient; 0 in rows without loss, never read.

    Args:
        keep: [B · S/cp] rows that carry loss.
    """
    order = head.row_order(group)
    hidden = _Shared.apply(head.hidden.reshape(-1, head.hidden.shape[-1]), group, head.sequence_parallel)
    hidden = torch.where(order.to_rows(keep)[:, None], hidden, 0)
    z = torch.nn.functional.linear(hidden, head.weight, head.bias)
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return order.to_logits(z).view(order.sequences, order.width, head.weight.shape[0])


def check_whole(head: LMHeadInput, group: ProcessGroup | None) -> None:
    """Check that the head's options allow whole logits.

    Raises:
        ValueError: a mode or main_grad_factor that excludes them, a budget that does not hold them.
    """
    if head.mode not in ("auto", "resident"):
        raise ValueError(
            f"mode = {head.mode!r} is incompatible with a loss that reads whole logits; leave it at 'auto'"
        )
    if head.main_grad_factor is not None:
        raise ValueError("main_grad_factor has no effect with a loss that reads whole logits; leave it out")
    size = head.logits_like(group).numel() * head.hidden.element_size()
    if head.budget is not None and size > head.budget:
        raise ValueError(
            f"budget = {head.budget} bytes does not hold the whole logits that this loss reads, {size} bytes"
        )


class _Shared(torch.autograd.Function):
    """Hidden rows that every tensor rank multiplies with its columns: gathered where split, their gradients summed."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, group: ProcessGroup | None, scatter: bool) -> Tensor:
        ctx.group, ctx.scatter = group, scatter  # type: ignore[attr-defined]
        return all_gather_start(hidden, group).wait() if scatter else hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        group, scatter = ctx.group, ctx.scatter  # type: ignore[attr-defined]
        if group_size(group) > 1 and not scatter:
            gradient = gradient.clone()  # it is summed in place
        return sum_start(gradient.contiguous(), group, scatter).wait(), None, None
