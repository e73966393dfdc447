"""Log-prob, entropy and log-sum-exp of every token from vocabulary shards: one read, one collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.groups import all_gather
from parallel_rl.validation import agreed_check, checks_values, shape_numbers
from parallel_rl.vocab.backends.choice import Backend, check_backend
from parallel_rl.vocab.backends.passes import RowSpec, combine_rows, row_gradient, row_parts
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.shards import ShardRange, shard_range

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup

IGNORE_INDEX = -100


class TokenStats(NamedTuple):
    """Statistics of each token, in max(float32, the logits' dtype), differentiable in any combination."""

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor


def token_stats(
    logits: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = IGNORE_INDEX,
    entropy: bool = True,
    consume_logits: bool = False,
    backend: Backend = "auto",
) -> TokenStats:
    """Log-prob of the target, entropy and log-sum-exp of softmax(z / temperature) from vocabulary shards.

        log p_y = z_y/T − lse        H = −Σ p log p        lse = log Σ e^{z/T}

    One read of the logits and one all-gather of [tokens, 4] floats forward; one read and one write, no collective,
    backward. All ranks of the group hold the same bits.

    Args:
        logits: [..., V/tp] this rank's columns, any float dtype; the mathematics runs in max(float32, dtype).
        targets: [...] global token ids; the same on all ranks.
        group: tensor-parallel group; None is one shard.
        vocab_size: true size V; columns at or beyond it are padding, outside the softmax and with gradient 0. None: no
            padding, even shards. vocab_start: first column's id, for a split that is neither even nor `torch.chunk`'s.
        temperature: positive number, or [...] one for each token.
        ignore_index: where `targets` has it, all statistics are 0 with gradient 0, whatever the logits hold (NaN too).
        entropy: False leaves it out.
        consume_logits: the backward writes the gradient over the logits; nothing may read them afterwards.
        backend: "triton" (kernels; float64 logits stay with torch), "compiled" (torch.compile), "eager" (cache-sized
            blocks), or "auto": Triton on CUDA where it is installed, elsewhere compiled where the shard is large.

    Returns:
        `TokenStats` of tensors shaped like `targets`.

    Raises:
        ValueError: shapes, dtypes or options that do not fit; a target outside [0, V) (where values are checked, see
            `set_validation`), then on all ranks of the group.
    """
    span = ShardRange(0, 0, 0)

    def check() -> None:
        nonlocal span
        check_logits(logits, consume_logits, backend, temperature)
        span = shard_range(logits.shape[-1], group, vocab_size, vocab_start)
        if targets.shape != logits.shape[:-1] or targets.is_floating_point():
            raise ValueError(
                f"targets must be integers {list(logits.shape[:-1])}, got {targets.dtype} {list(targets.shape)}"
            )
        if isinstance(temperature, torch.Tensor) and temperature.shape not in (targets.shape, torch.Size([])):
            raise ValueError(f"temperature must be a number or {list(targets.shape)}, got {list(temperature.shape)}")
        check_targets(targets, span.vocab_size, ignore_index)

    agreed_check(check, [group], logits, shape_numbers(logits, vocab_size))
    keep = targets != ignore_index
    return stats_of_shard(logits, targets, keep, span, group, temperature, entropy, consume_logits, backend)


def stats_of_shard(
    logits: Tensor,
    targets: Tensor,
    keep: Tensor,
    span: ShardRange,
    group: ProcessGroup | None,
    temperature: float | Tensor,
    entropy: bool,
    consume_logits: bool,
    backend: Backend,
) -> TokenStats:
    """`token_stats` after its checks; `keep` [...] says which tokens count."""
    size = targets.numel(), logits.shape[-1]  # not −1: an empty shard of an uneven split has no column
    flat = logits.view(size) if consume_logits else logits.reshape(size)
    dtype = math_dtype(logits.dtype)
    if isinstance(temperature, torch.Tensor):
        inv_t = temperature.to(dtype).reciprocal().reshape(-1, 1)
    else:
        inv_t = torch.full((1, 1), 1.0 / temperature, dtype=dtype, device=logits.device)
    logp, ent, lse = _TokenStats.apply(
        flat, targets.reshape(-1), keep.reshape(-1), inv_t, span.start, span.valid, group, entropy, consume_logits, backend
    )  # fmt: skip
    shape = targets.shape
    return TokenStats(logp.view(shape), ent.view(shape) if entropy else None, lse.view(shape))


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        z: Tensor,
        targets: Tensor,
        keep: Tensor,
        inv_t: Tensor,
        start: int,
        valid: int,
        group: ProcessGroup | None,
        entropy: bool,
        consume: bool,
        backend: Backend,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        spec = RowSpec(targets, keep, inv_t, start, valid)
        parts = row_parts(z, spec, entropy, backend)
        logp, ent, lse, rows = combine_rows(all_gather(parts, group), spec, backend)
        ctx.save_for_backward(z, targets, keep, inv_t, rows)
        ctx.span = start, valid  # type: ignore[attr-defined]
        ctx.consume, ctx.backend, ctx.consumed = consume, backend, False  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return logp, ent, lse

    @staticmethod
    def backward(
        ctx: FunctionCtx, g_logp: Tensor | None, g_ent: Tensor | None, g_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("token statistics have no second derivative; call backward without create_graph=True")
        if ctx.consumed:  # type: ignore[attr-defined]
            raise RuntimeError(
                "the first backward wrote its gradient over the logits; consume_logits=False allows a second one"
            )
        if g_logp is None and g_ent is None and g_lse is None:
            return (None,) * 10
        z, targets, keep, inv_t, rows = ctx.saved_tensors  # type: ignore[attr-defined]
        spec = RowSpec(targets, keep, inv_t, *ctx.span)  # type: ignore[attr-defined]
        if ctx.consume:  # type: ignore[attr-defined]
            ctx.consumed, z = True, z.detach()  # type: ignore[attr-defined]
        dz = row_gradient(z, spec, rows, g_logp, g_ent, g_lse, ctx.consume, ctx.backend)  # type: ignore[attr-defined]
        return dz, *(None,) * 9


def check_logits(logits: Tensor, consume_logits: bool, backend: Backend, temperature: float | Tensor) -> None:
    """What shapes, dtypes and options can tell."""
    if not logits.is_floating_point() or logits.dim() < 2:
        raise ValueError(
            f"the logits must be floating point [..., V/tp] with two dimensions or more, "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    if consume_logits and not logits.is_contiguous():
        raise ValueError(
            f"consume_logits=True writes into the logits, which must be contiguous; got strides {logits.stride()} "
            f"for shape {list(logits.shape)}"
        )
    check_backend(backend, logits.device)
    if not isinstance(temperature, torch.Tensor) and not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be positive")


def check_targets(targets: Tensor, vocab_size: int, ignore_index: int | None = IGNORE_INDEX) -> None:
    """What only values can tell of the targets, where values are checked."""
    if not checks_values(targets):
        return
    wrong = (targets < 0) | (targets >= vocab_size)
    if ignore_index is not None:
        wrong &= targets != ignore_index
    if bool(wrong.any()):
        where = [int(i) for i in wrong.nonzero()[0]]
        raise ValueError(
            f"target {int(targets[tuple(where)])} at {where} lies outside the vocabulary [0, {vocab_size})"
        )
