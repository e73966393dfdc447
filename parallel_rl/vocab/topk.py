"""Chosen and largest columns of vocabulary shards, and a bucket of all others, without gathering the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import check_replicated
from parallel_rl.groups import all_gather, reduce_
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import (
    combine_parts,
    logits_gradient,
    math_dtype,
    row_blocks,
    rows_of,
    shard_stats,
)
from parallel_rl.vocab.consumed import check_backward, mark_consumed, refuse_second_derivative, saved_logits

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx

    from parallel_rl.vocab.shards import VocabShard


def gather_columns(logits: Tensor, ids: Tensor, keep: Tensor, shard: VocabShard) -> Tensor:
    """Gather each row's logits [T, K] at its own columns, over the temperature; differentiable.

        out[t, k] = z[t, ids[t, k]] / temperature

    Forward: one all-reduce of [T, K], with the same bits on all ranks. Backward: a local scatter.

    >>> from parallel_rl.vocab.shards import VocabShard
    >>> gather_columns(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2, 0]]), torch.tensor([True]), VocabShard.of(3))
    tensor([[3., 1.]])

    Args:
        logits: [T, V/tp] this rank's columns, any float dtype.
        ids: [T, K] integers, the same on all ranks of the group.
        keep: [T] bool; other rows are 0 with gradient 0, for any logits and ids.

    Raises:
        ValueError: shapes or dtypes; an id outside the vocabulary in a kept row (where values are checked).
    """
    columns, here = local_columns(logits, ids, keep, shard)
    inv_t = shard.inverse_temperature(math_dtype(logits.dtype), logits.device)
    gathered: Tensor = _Columns.apply(logits, columns, here, inv_t, shard)
    return gathered


def column_log_probs(logits: Tensor, ids: Tensor, keep: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Compute log-probs of each row's own columns under softmax(z / temperature), and its entropy.

    Forward: one all-gather of [T, 4] and one all-reduce of [T, K] floats. Backward: no collective.

    >>> from parallel_rl.vocab.shards import VocabShard
    >>> column_log_probs(torch.zeros(1, 4), torch.tensor([[2, 0]]), torch.tensor([True]), VocabShard.of(4))
    (tensor([[-1.3863, -1.3863]]), tensor([1.3863]))

    Args:
        logits: [T, V/tp]. ids: [T, K]. keep: [T] bool, as for `gather_columns`, with its errors.

    Returns:
        [T, K] and [T] in max(float32, the logits' dtype), both 0 with gradient 0 in rows that are not kept.
    """
    columns, here = local_columns(logits, ids, keep, shard)
    inv_t = shard.inverse_temperature(math_dtype(logits.dtype), logits.device)
    log_probs, entropy = _ColumnLogProbs.apply(logits, columns, here, keep, inv_t, shard)
    return log_probs, entropy


def local_columns(logits: Tensor, ids: Tensor, keep: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Find ids' columns of this shard (0 elsewhere), and which are here and kept; see `gather_columns`.

    >>> from parallel_rl.vocab.shards import VocabShard
    >>> ids, keep, shard = torch.tensor([[3, 0]]), torch.tensor([True]), VocabShard(start=2, valid=2, vocab_size=4)
    >>> local_columns(torch.zeros(1, 2), ids, keep, shard)
    (tensor([[1, 0]]), tensor([[ True, False]]))
    """
    if logits.dim() != 2 or ids.dim() != 2 or ids.shape[0] != logits.shape[0]:
        raise ValueError(f"logits [T, V/tp] and ids [T, K] must agree, got {list(logits.shape)} and {list(ids.shape)}")
    check_columns("ids", torch.where(keep[:, None], ids, 0), shard.vocab_size)
    columns, here = shard.local(ids)
    return columns, here & keep[:, None]


def check_columns(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError for ids that are no integers or, if checked, outside the vocabulary."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got {ids.dtype}")
    if not checks_values(ids):
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    if bool(wrong.any()):
        where = [int(i) for i in wrong.nonzero()[0]]
        raise ValueError(f"{name} = {int(ids[tuple(where)])} at {where} lies outside the vocabulary [0, {vocab_size})")


@torch.no_grad()
def top_columns(logits: Tensor, k: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Find each row's k largest logits [T, k], descending, in float32 or wider, and their ids [T, k].

    Each shard's largest, then two all-gathers of [T, k]. Of equal logits the smaller id comes first, for every split.

    >>> from parallel_rl.vocab.shards import VocabShard
    >>> top_columns(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 2, VocabShard.of(4))
    (tensor([[3., 3.]]), tensor([[1, 3]]))

    Args:
        logits: [T, V/tp], before any temperature. k: 1 to `shard.vocab_size`, else ValueError.
    """
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= shard.vocab_size:
        raise ValueError(f"k = {k!r} must be an integer in [1, vocab_size = {shard.vocab_size}]")
    rows, local_k = logits.shape[0], min(k, shard.valid)
    best = logits.new_full((rows, k), -torch.inf, dtype=math_dtype(logits.dtype))
    ids = torch.full((rows, k), shard.vocab_size, dtype=torch.int64, device=logits.device)
    if local_k > 0:
        values, columns = _top_of_shard(logits[:, : shard.valid], local_k)
        best[:, :local_k], ids[:, :local_k] = values.to(best.dtype), columns + shard.start
    best, ids = (all_gather(part, shard.group).transpose(0, 1).flatten(1) for part in (best, ids))
    # a shard's padding may tie with a real −inf, whose id is smaller
    order = ids.argsort(dim=1, stable=True)
    best, ids = best.gather(1, order), ids.gather(1, order)
    order = best.argsort(dim=1, descending=True, stable=True)[:, :k]
    return best.gather(1, order), ids.gather(1, order)


def _top_of_shard(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row; of ties at the k-th, those with the smallest columns."""
    if k == 1:
        values, columns = z.max(1, keepdim=True)  # the first of equals
        return values, columns
    values, columns = z.topk(k, dim=1)
    last = values[:, -1:]
    above = (values > last).sum(1, keepdim=True)
    all_columns = torch.arange(z.shape[1], dtype=torch.int32, device=z.device)
    for rows in row_blocks(z):
        ties = torch.where(z[rows] == last[rows], all_columns, z.shape[1])
        first = ties.topk(k, dim=1, largest=False).values
        nth = torch.arange(k, device=z.device) - above[rows]
        columns[rows] = torch.where(nth < 0, columns[rows], first.gather(1, nth.clamp(min=0)).to(torch.int64))
    return values, columns


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, z: Tensor, columns: Tensor, here: Tensor, inv_t: Tensor, shard: VocabShard) -> Tensor:
        ctx.save_for_backward(columns, here, inv_t)
        ctx.shape, ctx.dtype = z.shape, z.dtype  # type: ignore[attr-defined]
        if z.shape[1] == 0:  # an empty shard of an uneven split
            values = torch.zeros(columns.shape, dtype=inv_t.dtype, device=z.device)
        else:
            values = torch.where(here, z.gather(1, columns).to(inv_t.dtype) * inv_t, 0.0)
        reduce_(values, shard.group)
        return values

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("gathered columns have")
        columns, here, inv_t = ctx.saved_tensors  # type: ignore[attr-defined]
        dz = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)  # type: ignore[attr-defined]
        if dz.shape[1] > 0:
            # a column that is not here adds 0 to column 0
            dz.scatter_add_(1, columns, torch.where(here, grad * inv_t, 0.0).to(dz.dtype))
        return dz, None, None, None, None


class _ColumnLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, z: Tensor, columns: Tensor, here: Tensor, keep: Tensor, inv_t: Tensor, shard: VocabShard
    ) -> tuple[Tensor, Tensor]:
        nowhere = torch.full((z.shape[0],), -1, device=z.device)
        parts = shard_stats(z[:, : shard.valid], nowhere, inv_t, entropy=True, backend=shard.backend)
        top, log_a, _, entropy = combine_parts(all_gather(parts, shard.group), inv_t, entropy=True)
        assert entropy is not None
        values = torch.zeros(columns.shape, dtype=inv_t.dtype, device=z.device)
        if shard.valid > 0:
            log_p = (z.gather(1, columns).to(inv_t.dtype) - top[:, None]) * inv_t - log_a[:, None]
            values = torch.where(here, log_p, 0.0)
        reduce_(values, shard.group)
        ctx.save_for_backward(z, columns, here, keep, inv_t, top, log_a, entropy)
        ctx.shard, ctx.consumed = shard, False  # type: ignore[attr-defined]
        return values, torch.where(keep, entropy, 0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, g_columns: Tensor, g_entropy: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(ctx, "column log-probs have")
        z, columns, here, keep, inv_t, top, log_a, entropy = saved_logits(ctx)
        shard: VocabShard = ctx.shard  # type: ignore[attr-defined]
        check_replicated([*g_columns.unbind(1), g_entropy], shard.group, g_entropy)
        valid, ctx.consumed = shard.valid, shard.consume_logits  # type: ignore[attr-defined]
        scale = inv_t[:, 0]
        c0, c1 = (-g_columns.sum(1) - g_entropy * entropy) * scale, -g_entropy * scale
        rows = torch.stack([top, log_a, c0, c1], 1)
        at_columns = torch.where(here, g_columns * inv_t, 0.0)
        z = z.detach()
        dz = z if ctx.consumed else torch.empty_like(z, memory_format=torch.contiguous_format)  # type: ignore[attr-defined]
        dz[:, valid:] = 0
        for part in row_blocks(z[:, :valid]) if valid else ():
            # in the mathematics' dtype: two rounded gradients could leave only rounding
            gradient = logits_gradient(z[part, :valid], inv_t, rows[part], keep[part])
            dz[part, :valid] = gradient.scatter_add_(1, columns[part], at_columns[part]).to(dz.dtype)
        if ctx.consumed:  # type: ignore[attr-defined]
            mark_consumed(dz)
        return dz, *(None,) * 5


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
