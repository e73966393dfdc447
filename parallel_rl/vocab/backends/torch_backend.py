"""The two passes over a vocabulary shard in PyTorch: eager in cache-sized row blocks, or compiled into one loop.

A row z of a shard gives four values relative to its own maximum m, and a fifth, q = Σ e^{2u}, for Σπ²:

    m = max z    a = Σ e^u    t = u_y or −inf    b = Σ e^u·u        with u = (z − m) / temperature

The gradient is one more pass, `dz = p·(c0 + c1·log p) + 1[y]·ct` with per-row coefficients. It takes e^x as 2^(x·log2 e), with
log2 e in the temperature's factor. The statistics do not: the rounded factor would make every sum too small.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch

from parallel_rl.vocab.backends.choice import Backend

if TYPE_CHECKING:
    from torch import Tensor

_LOG2E, _LN2 = math.log2(math.e), math.log(2)
_LOWEST = -1e30  # below any exponent that matters, yet finite: 0 · _LOWEST is 0 where a logit is −inf
_NO_MASS = -2048.0  # 2^x is 0 below it in every dtype, and no loss scale makes p's factor infinite (0 · ∞)
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 25}  # scratch elements of the eager loop: fit a CPU's cache, fill a GPU
_COMPILE_FROM = 1 << 22  # logits; for fewer, compiling costs more than it saves


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return max(float32, `dtype`), the dtype of the mathematics."""
    return torch.promote_types(dtype, torch.float32)


def shard_stats(z: Tensor, y: Tensor, inv_t: Tensor, entropy: bool, backend: Backend, squares: bool = False) -> Tensor:
    """Reduce logits [T, W] and local target columns (or −1) to [T, 3 + entropy + squares] (m, a, t, b, q)."""
    if not z.numel():  # a shard that is all padding, or no rows
        empty = z.new_zeros((z.shape[0], 3 + entropy + squares), dtype=math_dtype(z.dtype))
        empty[:, 0:3:2] = -torch.inf
        return empty
    if compiles(z, backend):
        _vary_rows(z, y, inv_t)
        return compiled(_stats)(z, y, inv_t, entropy, squares)
    return torch.cat([_stats(z[rows], y[rows], rows_of(inv_t, rows), entropy, squares) for rows in row_blocks(z)])


def shard_grad(
    z: Tensor, y: Tensor, inv_t: Tensor, rows: Tensor, ct: Tensor, keep: Tensor, out: Tensor, backend: Backend
) -> None:
    """Write the gradient of a shard to `out`, which may be `z`.

    Args:
        rows: [T, 4] (M, log A, c0, c1), or [T, 3] if every c1 is 0. ct: [T]. keep: [T]; other rows get an exact 0.
    """
    if not z.numel():
        return
    # the target's column alone, from its original logit: comparing all columns with y would cost as much as e^u
    at_row = torch.arange(z.shape[0], device=z.device), y.clamp(min=0)
    at_target = logits_gradient(z[at_row][:, None], inv_t, rows, keep)[:, 0] + torch.where(keep & (y >= 0), ct, 0.0)
    if compiles(z, backend):
        _vary_rows(z, inv_t, rows, keep, out)
        compiled(_grad_in_place if out is z else _grad_to)(z, inv_t, rows, keep, out)
    else:
        for part in row_blocks(z):
            out[part].copy_(logits_gradient(z[part], rows_of(inv_t, part), rows[part], keep[part]))
    out[at_row] = at_target.to(out.dtype)  # not scatter_, which on a CPU takes longer than the pass for bfloat16


def combine_parts(parts: Tensor, inv_t: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Combine parts [ranks, T, 3 to 5] at the global maximum M: (M, log A, (z_y − M)/temperature, H)."""
    m, a, t = parts[..., 0], parts[..., 1], parts[..., 2]
    top = m.amax(0)
    shift = ((m - top) * inv_t[:, 0]).clamp(min=_LOWEST)
    weight = shift.exp()
    total = (a * weight).sum(0)
    log_a = total.log()
    target = (t + shift).amax(0)
    ent = log_a - (weight * (parts[..., 3] + a * shift)).sum(0) / total if entropy else None
    return top, log_a, target, ent


def combine_squares(parts: Tensor, inv_t: Tensor, top: Tensor, log_a: Tensor) -> Tensor:
    """Combine Σπ² [T] from parts [ranks, T, 5] and results of `combine_parts`."""
    shift = ((parts[..., 0] - top) * inv_t[:, 0]).clamp(min=_LOWEST)
    return (parts[..., 4] * (2 * (shift - log_a)).exp()).sum(0)


def _stats(z: Tensor, y: Tensor, inv_t: Tensor, entropy: bool, squares: bool) -> Tensor:
    z = z.to(math_dtype(z.dtype))
    m = z.amax(1, keepdim=True)
    base = torch.where(m == -torch.inf, 0.0, m)  # a row of −inf: e^u must be 0, not NaN
    target = (z.gather(1, y.clamp(min=0)[:, None]) - base) * inv_t
    t = torch.where(y[:, None] >= 0, target, -torch.inf)
    u = (z - base).mul_(inv_t)
    if not entropy:
        return torch.cat([m, u.exp_().sum(1, keepdim=True), t], dim=1)
    p = u.clamp_(min=_LOWEST).exp()
    q = [p.square().sum(1, keepdim=True)] if squares else []
    return torch.cat([m, p.sum(1, keepdim=True), t, p.mul_(u).sum(1, keepdim=True), *q], dim=1)


def logits_gradient(z: Tensor, inv_t: Tensor, rows: Tensor, keep: Tensor) -> Tensor:
    """Compute p·(c0 + c1·log p) of logits [T, W] from rows [T, 3 or 4], in their dtype; 0 if not kept."""
    top, log_a, c0, *c1 = rows[:, :, None].unbind(1)
    bits = (z.to(rows.dtype) - top).mul_(inv_t * _LOG2E).sub_(log_a * _LOG2E)  # log2 p
    if c1:
        bits = bits.clamp_(min=_NO_MASS)
        dz = bits.exp2().mul_(c0 + c1[0] * _LN2 * bits)
    else:
        dz = bits.exp2_().mul_(c0)
    return torch.where(keep[:, None], dz, 0.0)


def _grad_to(z: Tensor, inv_t: Tensor, rows: Tensor, keep: Tensor, out: Tensor) -> None:
    out.copy_(logits_gradient(z, inv_t, rows, keep))


def _grad_in_place(z: Tensor, inv_t: Tensor, rows: Tensor, keep: Tensor, out: Tensor) -> None:
    z.copy_(logits_gradient(z, inv_t, rows, keep))


def rows_of(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x if len(x) == 1 else x[rows]


def row_blocks(z: Tensor) -> Iterator[slice]:
    """Return `even_blocks` whose scratch stays in a CPU's cache and fills a GPU."""
    return even_blocks(z, _BLOCK.get(z.device.type, _BLOCK["cuda"]))


def even_blocks(z: Tensor, elements: int, least: int = 1) -> Iterator[slice]:
    """Return slices of the rows of [T, W] of about `elements` elements, in sizes that differ by ≤ 1.

    A block has `least` rows if there are as many: torch.compile makes another function for a single row.

    >>> list(even_blocks(torch.zeros(5, 4), 8))
    [slice(0, 1, None), slice(1, 3, None), slice(3, 5, None)]
    """
    count = -(-len(z) // max(least, elements // max(z.shape[1], 1)))
    return (slice(len(z) * i // count, len(z) * (i + 1) // count) for i in range(count))


@cache
def compiled(function: Callable) -> Callable:
    # each dtype, stride, width and option is a variant; beyond torch's limit (8) a shard would silently run eagerly
    raise_limit = torch._dynamo.config.patch(recompile_limit=32)
    limited: Callable = raise_limit(torch.compile(function))
    return limited


def _vary_rows(*tensors: Tensor) -> None:
    """Mark rows as dynamic, since batches vary; a known width makes the loop a tenth faster."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


@cache
def compiler_works(device: str) -> bool:
    """Return whether torch.compile runs on this device; if not, warn once with the reason."""
    try:
        compiled(_stats)(
            torch.zeros(2, 8, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
            torch.ones(1, 1, device=device),
            False,
            False,
        )
    except Exception as error:  # raised for a missing C++ compiler or Triton
        warnings.warn(
            f"torch.compile does not work here, so the eager backend is used: {str(error).splitlines()[0]}",
            stacklevel=2,
        )
        return False
    return True


def compiles(z: Tensor, backend: Backend) -> bool:
    if backend in ("compiled", "eager"):
        return backend == "compiled"
    return z.numel() >= _COMPILE_FROM and compiler_works(z.device.type)
