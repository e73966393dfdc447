"""The smallest logit that a top-k or top-p row keeps, from vocabulary shards, without gathering or sorting them.

It is the largest number τ with H(τ) ≥ target, where

    top-k:  H(τ) = #{v: z_v ≥ τ}                         target = k
    top-p:  H(τ) = Σ_{z_v ≥ τ} e^{(z_v − max z)/T}         target = p · H(−∞), over what top-k left

so that ties at the threshold stay, and the largest logit too. τ is found digit by digit on the ordered bit patterns of the
logits' dtype: a pass reads the shard once, and one all-reduce of [T, 8] integers joins the ranks. Masses are integers too,
multiples of a fixed fraction of the largest one, so that their sums depend on no order and no split.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from parallel_rl.groups import group_size
from parallel_rl.vocab.backends.torch_backend import compiled, compiler_works, compiles, math_dtype, row_blocks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.backends.choice import Backend
    from parallel_rl.vocab.shards import VocabShard

_DIGIT = 3  # bits of the threshold that one pass finds
# A search makes several passes, and eager ones are slow: compiling pays from fewer logits on than for one pass.
_COMPILE_FROM = 1 << 18
# bits of a float, the integer of that size, and the pattern of +inf
_PATTERNS = {
    torch.bfloat16: (16, torch.int16, 0x7F80),
    torch.float16: (16, torch.int16, 0x7C00),
    torch.float32: (32, torch.int32, 0x7F80_0000),
    torch.float64: (64, torch.int64, 0x7FF0_0000_0000_0000),
}


def kept_floor(z: Tensor, shard: VocabShard) -> Tensor:
    """Find the smallest logit that each row keeps, [T, 1] in z's dtype; −inf where all stay. The same on every split.

    >>> from parallel_rl.vocab.shards import VocabShard
    >>> from parallel_rl.vocab.truncation import Truncation
    >>> kept_floor(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), VocabShard(0, 4, 4, truncation=Truncation(top_k=2)))
    tensor([[3.]])

    Args:
        z: [T, W] the shard's real columns.
    """
    top_k, top_p, vocab_size = shard.truncation.top_k, shard.truncation.top_p, shard.vocab_size
    group, backend = shard.group, shard.backend
    floor = torch.full((z.shape[0], 1), -torch.inf, dtype=math_dtype(z.dtype), device=z.device)
    if top_k is not None and top_k < vocab_size:
        floor = _search(partial(_held, _counts, z, backend, ()), lambda total: torch.full_like(total, top_k), z, group)
    if top_p is not None and top_p < 1:
        top = (z.amax(1, keepdim=True) if z.shape[1] else floor).double()
        if group_size(group) > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        top = torch.where(top == -torch.inf, 0.0, top)
        bits = 62 - max(1, (vocab_size - 1).bit_length())  # the sum of V masses of at most 2^bits fits
        scale = torch.full((1, 1), 2.0**bits, dtype=torch.float64, device=z.device)
        inv_t = shard.inverse_temperature(torch.float64, z.device).expand(len(z), 1).contiguous()
        rest = (floor, top, inv_t, scale)

        def target(total: Tensor) -> Tensor:
            return (total.double() * top_p).ceil().to(torch.int64).minimum(total).clamp(min=1)

        floor = _search(partial(_held, _masses, z, backend, rest), target, z, group)
    return floor.to(z.dtype)


def drop_below_(z: Tensor, floor: Tensor) -> None:
    """Write −inf over the logits [T, W] below each row's floor [T, 1], as found by `kept_floor`."""
    for rows in row_blocks(z):  # the mask is never whole
        z[rows].masked_fill_(z[rows] < floor[rows], -torch.inf)


def _search(
    held: Callable[[Tensor], Tensor], target: Callable[[Tensor], Tensor], z: Tensor, group: ProcessGroup | None
) -> Tensor:
    """Find [T, 1] the largest τ with H(τ) ≥ target(H(−inf)); `held` gives this shard's part of H at pivots [T, 8]."""
    bits, integers, infinity = _PATTERNS[z.dtype]

    def floats(key: Tensor) -> Tensor:
        """Integers in the order of the floats, patterns of NaN left out, as floats."""
        key = key.clamp(-infinity - 1, infinity)
        pattern = torch.where(key < 0, key ^ ((1 << (bits - 1)) - 1), key)
        return pattern.to(integers).view(z.dtype).to(math_dtype(z.dtype))

    key = torch.full((z.shape[0], 1), -(1 << (bits - 1)), dtype=torch.int64, device=z.device)
    digits = torch.arange(1 << _DIGIT, device=z.device)
    wanted: Tensor | None = None
    # The last digit may overlap the one before: what lies above the threshold fails the test again.
    for shift in (*range(bits - _DIGIT, 0, -_DIGIT), 0):
        sums = held(floats(key + (digits << shift)))  # wraps around to the right key where the shift overflows
        if group_size(group) > 1:
            dist.all_reduce(sums, group=group)
        if wanted is None:
            wanted = target(sums[:, :1])  # the very first pivot is −inf
        key = key + ((sums[:, 1:] >= wanted).sum(1, keepdim=True) << shift)
    return floats(key)


def _held(
    function: Callable[..., Tensor], z: Tensor, backend: Backend, rest: tuple[Tensor, ...], pivots: Tensor
) -> Tensor:
    if not z.numel():
        return torch.zeros(pivots.shape, dtype=torch.int64, device=z.device)
    worth = backend == "auto" and z.numel() >= _COMPILE_FROM and compiler_works(z.device.type)
    if worth or compiles(z, backend):
        return compiled(function)(z, pivots, *rest)
    operands = (z, pivots, *rest)
    return torch.cat([function(*(x if len(x) == 1 else x[rows] for x in operands)) for rows in row_blocks(z)])


def _counts(z: Tensor, pivots: Tensor) -> Tensor:
    z = z.to(pivots.dtype)
    return torch.stack([(z >= pivot[:, None]).sum(1, dtype=torch.int32) for pivot in pivots.unbind(1)], 1).long()


def _masses(z: Tensor, pivots: Tensor, floor: Tensor, top: Tensor, inv_t: Tensor, scale: Tensor) -> Tensor:
    z = z.to(pivots.dtype)
    # in float64: another rounding of e^x, on another width of a shard, must not move a threshold
    mass = (((z.double() - top) * inv_t).exp() * scale).to(torch.int64)
    mass = torch.where(z >= floor, mass, 0)
    return torch.stack([torch.where(z >= pivot[:, None], mass, 0).sum(1) for pivot in pivots.unbind(1)], 1)
