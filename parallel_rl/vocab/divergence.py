"""Divergence of two distributions per token from vocabulary shards: two collectives, none backward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import check_replicated
from parallel_rl.groups import all_gather
from parallel_rl.vocab.backends.torch_backend import (
    combine_parts,
    compiled,
    compiles,
    math_dtype,
    row_blocks,
    shard_stats,
)
from parallel_rl.vocab.consumed import check_backward, mark_consumed, saved_logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.autograd.function import FunctionCtx

    from parallel_rl.functional.distillation import Divergence
    from parallel_rl.vocab.backends.choice import Backend
    from parallel_rl.vocab.shards import VocabShard


def divergence_of_shards(
    student: Tensor,
    teacher: Tensor,
    keep: Tensor,
    divergence: Divergence,
    shard: VocabShard,
    teacher_temperature: float | Tensor = 1.0,
) -> Tensor:
    """Compute D(p, q) per token, p = softmax(teacher / T_p), q = softmax(student / T_q).

    Differentiable in the student. Forward: all-gathers of [T, 4] and [T, 2] floats, combined in rank order, so all ranks hold
    the same bits. Backward: no collective, one more read in blocks of rows.

    >>> from parallel_rl.functional.distillation import ForwardKL
    >>> from parallel_rl.vocab.shards import VocabShard
    >>> keep, shard = torch.tensor([True]), VocabShard.of(2)
    >>> divergence_of_shards(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]]), keep, ForwardKL(), shard)
    tensor([0.1109])

    Args:
        student, teacher: [T, V/tp] this rank's columns, any float dtypes, read up to `shard.valid`. −inf excludes a token id.
        keep: [T] bool; other rows are 0 with gradient 0.
        shard: of both; its temperature T_q is the student's, `consume_logits` consumes the student's logits.

    Returns:
        [T] in max(float32, the student's dtype).
    """
    value: Tensor = _DivergenceOfShards.apply(student, teacher, keep, divergence, shard, teacher_temperature)
    return value


class _DivergenceOfShards(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        student: Tensor,
        teacher: Tensor,
        keep: Tensor,
        divergence: Divergence,
        shard: VocabShard,
        teacher_temperature: float | Tensor,
    ) -> Tensor:
        z, w = student[:, : shard.valid], teacher[:, : shard.valid]
        nowhere = torch.full((z.shape[0],), -1, device=z.device)
        of_teacher = replace(shard, temperature=teacher_temperature, logit_scale=1.0)
        inv = [x.inverse_temperature(math_dtype(student.dtype), z.device) for x in (shard, of_teacher)]
        parts = [
            shard_stats(x, nowhere, inv_t, entropy=False, backend=shard.backend).to(inv_t.dtype)
            for x, inv_t in zip((z, w), inv, strict=True)
        ]
        both = all_gather(torch.cat([part[:, :2] for part in parts], 1), shard.group)
        rows = torch.cat([_normaliser(part, inv_t) for part, inv_t in zip(both.split(2, -1), inv, strict=True)], 1)
        sums = rows.new_zeros(len(z), 2)
        for part, of_rows in _over_rows(_sums_of_block, divergence, shard.backend, z, w, rows):
            sums[part] = of_rows
        sums = all_gather(sums, shard.group).sum(0)
        ctx.save_for_backward(student, teacher, keep, rows, sums[:, 1])
        ctx.divergence, ctx.shard, ctx.consumed = divergence, shard, False  # type: ignore[attr-defined]
        return torch.where(keep, sums[:, 0], 0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(ctx, "the divergence has")
        student, teacher, keep, rows, total = saved_logits(ctx)
        shard: VocabShard = ctx.shard  # type: ignore[attr-defined]
        check_replicated([grad], shard.group, grad)
        valid, ctx.consumed = shard.valid, shard.consume_logits  # type: ignore[attr-defined]
        z, slope = student.detach(), torch.stack([total, grad * rows[:, 2]], 1)
        dz = z if ctx.consumed else torch.empty_like(z, memory_format=torch.contiguous_format)  # type: ignore[attr-defined]
        read = z[:, :valid], teacher[:, :valid], rows, slope, keep
        for part, of_rows in _over_rows(_grad_of_block, ctx.divergence, shard.backend, *read):  # type: ignore[attr-defined]
            dz[part, :valid] = of_rows
        dz[:, valid:] = 0
        if ctx.consumed:  # type: ignore[attr-defined]
            mark_consumed(dz)
        return dz, *(None,) * 5


def _normaliser(parts: Tensor, inv_t: Tensor) -> Tensor:
    """Combine [tp, T, 2] maxima and sums to [T, 3]: row maximum, log-sum and 1 / temperature."""
    top, log_a, *_ = combine_parts(torch.nn.functional.pad(parts, (0, 1)), inv_t, entropy=False)
    return torch.stack([top, log_a, inv_t[:, 0].expand_as(top)], 1)


def _over_rows(
    function: Callable[..., Tensor], divergence: Divergence, backend: Backend, z: Tensor, *others: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, the function's result) block by block, so that no second shard is in memory."""
    function = compiled(function) if z.shape[1] > 0 and compiles(z, backend) else function
    for part in row_blocks(z):
        yield part, function(divergence, *(x[part] for x in (z, *others)))


def _sums_of_block(divergence: Divergence, z: Tensor, w: Tensor, rows: Tensor) -> Tensor:
    value, g = divergence.terms(*_log_probs(z, w, rows))
    return torch.stack([value.sum(1), g.sum(1)], 1)


def _grad_of_block(divergence: Divergence, z: Tensor, w: Tensor, rows: Tensor, slope: Tensor, keep: Tensor) -> Tensor:
    """Compute the gradient [T, W] in the logits' dtype; slope is [T, 2] Σ g and upstream / temperature."""
    log_p, log_q = _log_probs(z, w, rows)
    _, g = divergence.terms(log_p, log_q)
    total, upstream = slope[:, :, None].unbind(1)
    return torch.where(keep[:, None], (g - log_q.exp() * total) * upstream, 0.0).to(z.dtype)


def _log_probs(z: Tensor, w: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    top_q, log_q, inv_q, top_p, log_p, inv_p = rows[:, :, None].unbind(1)
    return (w.to(rows.dtype) - top_p) * inv_p - log_p, (z.to(rows.dtype) - top_q) * inv_q - log_q
