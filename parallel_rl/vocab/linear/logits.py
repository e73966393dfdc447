"""Whole logits from hidden states and the LM head, for losses that read the whole distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.groups import all_gather_start, sum_start
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.consumed import refuse_second_derivative
from parallel_rl.vocab.linear.gemm import WeightTarget, add_hidden_gradient, project
from parallel_rl.vocab.linear.lm_head import LMHeadInput

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup


def whole_logits(head: LMHeadInput, keep: Tensor, valid: int, group: ProcessGroup | None) -> Tensor:
    """Project to logits [B, S/cp, V/tp], with gradient; 0 in padding columns and rows without loss.

    Logits, their gradient and all sums are float32 (float64 for float64 operands). `keep` [B · S/cp] marks rows with loss, and
    `valid` is the number of real rows of the weight.
    """
    order = head.row_order(group)
    keep = order.to_rows(keep)
    target = WeightTarget(head.weight, head.main_grad_factor)
    z: Tensor = _Project.apply(head.hidden, head.weight, head.bias, keep, target, valid, group, head.sequence_parallel)
    if head.logit_scale != 1:
        z = head.logit_scale * z
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return order.to_logits(z).view(order.sequences, order.width, head.weight.shape[0])


def check_whole(head: LMHeadInput, group: ProcessGroup | None) -> None:
    """Raise ValueError for a mode without whole logits, or a budget that does not hold them."""
    if head.mode not in ("auto", "resident"):
        raise ValueError(
            f"mode = {head.mode!r} is incompatible with a loss that reads whole logits; leave it at 'auto'"
        )
    size = head.logits_like(group).numel() * math_dtype(head.hidden.dtype).itemsize
    if head.budget is not None and size > head.budget:
        raise ValueError(
            f"budget = {head.budget} bytes does not hold the whole logits that this loss reads, {size} bytes"
        )


class _Project(torch.autograd.Function):
    """Logits [N, V/tp] of all parts' rows; hidden gradients are summed over the ranks that share them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        keep: Tensor,
        target: WeightTarget,
        valid: int,
        group: ProcessGroup | None,
        scatter: bool,
    ) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        rows = torch.where(keep[:, None], all_gather_start(rows, group).wait() if scatter else rows, 0)
        z = torch.empty(len(rows), valid, dtype=math_dtype(hidden.dtype), device=hidden.device)
        project(rows, weight[:valid], z)
        if bias is not None:
            z.add_(bias[:valid])
        ctx.save_for_backward(rows, weight, keep)
        ctx.shape, ctx.bias = hidden.shape, None if bias is None else bias.dtype  # type: ignore[attr-defined]
        ctx.target, ctx.valid, ctx.group, ctx.scatter = target, valid, group, scatter  # type: ignore[attr-defined]
        return torch.nn.functional.pad(z, (0, weight.shape[0] - valid))

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("whole logits of an LM head have")
        rows, weight, keep = ctx.saved_tensors  # type: ignore[attr-defined]
        valid: int = ctx.valid  # type: ignore[attr-defined]
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        dz = torch.where(keep[:, None], gradient[:, :valid], 0)
        d_hidden = d_weight = d_bias = None
        if of_bias:
            d_bias = gradient.new_zeros(weight.shape[0], dtype=ctx.bias)  # type: ignore[attr-defined]
            d_bias[:valid] = dz.sum(0)
        dz = dz if dz.device.type == "cpu" else dz.to(weight.dtype)  # the products' dtype
        if of_hidden:
            sums = torch.zeros(rows.shape, dtype=gradient.dtype, device=rows.device)
            add_hidden_gradient(sums, dz, weight[:valid])
            sums = sum_start(sums, ctx.group, ctx.scatter).wait()  # type: ignore[attr-defined]
            d_hidden = sums.to(rows.dtype).view(ctx.shape)  # type: ignore[attr-defined]
        if of_weight:
            d_weight = ctx.target.add(dz, rows, valid)  # type: ignore[attr-defined]
        return d_hidden, d_weight, d_bias, *(None,) * 5
