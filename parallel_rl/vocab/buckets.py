"""Log-probs of selected columns plus a bucket of all others, accurate for a tiny rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import check_replicated
from parallel_rl.groups import all_gather, reduce_
from parallel_rl.vocab.backends.torch_backend import math_dtype, row_blocks, rows_of
from parallel_rl.vocab.consumed import check_backward, mark_consumed, saved_logits
from parallel_rl.vocab.topk import local_columns

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx

    from parallel_rl.vocab.shards import VocabShard


def bucketed_log_probs(logits: Tensor, ids: Tensor, keep: Tensor, shard: VocabShard) -> Tensor:
    """Compute log-probs of each row's own columns and of all others together, at the temperature.

        out[t, k] = log q(ids[t, k])        out[t, K] = log Σ_{v not in ids[t]} q(v)

    The rest is summed over its own columns: 1 − Σ of the others would be off by 1e-7 in float32. Forward: one all-gather of
    [T, 2] and one all-reduce of [T, K] floats. Backward: no collective, one more read in blocks of rows.

    >>> from parallel_rl.vocab.shards import VocabShard
    >>> ids, keep = torch.tensor([[0, 1]]), torch.tensor([True])
    >>> bucketed_log_probs(torch.tensor([[20.0, 1.0, 0.0, 0.0]]), ids, keep, VocabShard.of(4)).exp()[0, 2]
    tensor(4.1223e-09, dtype=torch.float64)

    Args:
        logits: [T, V/tp] this rank's columns, any float dtype; −inf excludes an id.
        ids: [T, K] integers, distinct in a row and the same on all ranks of the group.
        keep: [T] bool; other rows are 0 with gradient 0, for any logits and ids.

    Returns:
        [T, K + 1] float64, from shard passes in max(float32, the logits' dtype); the rest is −inf if no id is left.

    Raises:
        ValueError: shapes or dtypes; an id outside the vocabulary in a kept row (where values are checked).
    """
    columns, here = local_columns(logits, ids, keep, shard)
    inv_t = shard.inverse_temperature(math_dtype(logits.dtype), logits.device)
    log_probs: Tensor = _Buckets.apply(logits, columns, here, keep, inv_t, shard)
    return log_probs


class _Buckets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, z: Tensor, columns: Tensor, here: Tensor, keep: Tensor, inv_t: Tensor, shard: VocabShard
    ) -> Tensor:
        chosen = torch.zeros(columns.shape, dtype=inv_t.dtype, device=z.device)
        rest = chosen.new_zeros(len(z), 2)  # maximum, and Σ e^{(z − it)/temperature}
        rest[:, 0] = -torch.inf
        if shard.valid > 0:
            chosen = torch.where(here, z.gather(1, columns).to(inv_t.dtype), 0.0)
            for part in row_blocks(z):
                others = _others(z[part, : shard.valid], columns[part], here[part], inv_t.dtype)
                top = others.amax(1, keepdim=True)
                bits = others.sub_(_finite(top)).mul_(rows_of(inv_t, part))
                rest[part] = torch.cat([top, bits.exp_().sum(1, keepdim=True)], 1)
        reduce_(chosen, shard.group)
        # few numbers a row: in float64, 1 − q keeps its digits where q is near 1
        tops, sums = all_gather(rest, shard.group).double().unbind(-1)  # [tp, T]
        scale, top_of_rest = inv_t.double(), tops.amax(0)
        log_rest = (sums * ((tops - _finite(top_of_rest)) * scale[:, 0]).exp()).sum(0).log()
        top = torch.maximum(chosen.amax(1).double(), top_of_rest)[:, None]
        values = (torch.cat([chosen.double(), top_of_rest[:, None]], 1) - top) * scale
        values[:, -1] += log_rest
        log_probs = torch.where(keep[:, None], values.log_softmax(1), 0.0)
        ctx.save_for_backward(z, columns, here, keep, inv_t, top_of_rest, log_rest, log_probs)
        ctx.shard, ctx.consumed = shard, False  # type: ignore[attr-defined]
        return log_probs

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(ctx, "bucketed log-probs have")
        z, columns, here, keep, inv_t, top, log_rest, log_probs = saved_logits(ctx)
        shard: VocabShard = ctx.shard  # type: ignore[attr-defined]
        check_replicated([*grad.unbind(1)], shard.group, grad[:, 0])
        valid, ctx.consumed = shard.valid, shard.consume_logits  # type: ignore[attr-defined]
        z, dtype = z.detach(), inv_t.dtype
        slope = ((grad - grad.sum(1, keepdim=True) * log_probs.exp()) * inv_t.double()).to(dtype)
        at_columns, of_rest = torch.where(here, slope[:, :-1], 0.0), slope[:, -1:]
        top, log_rest = (_finite(x)[:, None].to(dtype) for x in (top, log_rest))
        dz = z if ctx.consumed else torch.empty_like(z, memory_format=torch.contiguous_format)  # type: ignore[attr-defined]
        dz[:, valid:] = 0
        for part in row_blocks(z) if valid else ():
            others = _others(z[part, :valid], columns[part], here[part], dtype)
            bits = others.sub_(top[part]).mul_(rows_of(inv_t, part)).sub_(log_rest[part])
            gradient = bits.exp_().mul_(of_rest[part]).scatter_add_(1, columns[part], at_columns[part])
            dz[part, :valid] = torch.where(keep[part, None], gradient, 0.0).to(dz.dtype)
        if ctx.consumed:  # type: ignore[attr-defined]
            mark_consumed(dz)
        return dz, *(None,) * 5


def _others(z: Tensor, columns: Tensor, here: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy the logits, with −inf at each row's own columns."""
    excluded = torch.where(here, -torch.inf, torch.inf).to(dtype)  # a column of another shard is mapped to column 0
    return z.to(dtype, copy=True).scatter_reduce_(1, columns, excluded, "amin")


def _finite(x: Tensor) -> Tensor:
    """Return x, or 0 where nothing is left: e^(−inf − 0) is 0, e^(−inf + inf) is not."""
    return torch.where(x == -torch.inf, 0.0, x)
