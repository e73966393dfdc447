"""Smallest logit that a top-k or top-p row keeps, from vocabulary shards, without gathering or sorting them.

It is the largest τ with H(τ) ≥ target, so ties at the threshold and the largest logit stay:

    top-k:  H(τ) = #{v: z_v ≥ τ}                         target = k
    top-p:  H(τ) = Σ_{z_v ≥ τ} e^{(z_v − max z)/T}         target = p · H(−∞), over what top-k left

τ is found digit by digit on the ordered bit patterns of the logits' dtype, with one all-reduce of [T, 8] integers a digit.
Masses are integers, multiples of a fixed fraction of the largest one, so their sums depend on no order and no split.

Top-p searches among a few logits of each row, which `brackets` finds in two reads. Rows whose threshold is not among them
read the shard for each digit: on a CPU afterwards; on a card together with the others, so that no rank waits for their number.
Top-k alone reads the shard for each digit, as does top-p on a card without Triton or traced by torch.compile for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from parallel_rl.groups import reduce_
from parallel_rl.vocab.backends.choice import runs_on_triton
from parallel_rl.vocab.backends.torch_backend import (
    compiled,
    compiler_works,
    compiles,
    even_blocks,
    math_dtype,
    row_blocks,
    rows_of,
)
from parallel_rl.vocab.brackets import capacity, copy_candidates, count_brackets, find_brackets

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.backends.choice import Backend
    from parallel_rl.vocab.shards import VocabShard

_DIGIT = 3  # bits of the threshold per pass
_COMPILE_FROM = 1 << 18  # logits: a search makes several passes, so compiling pays earlier than for one pass
_SCRATCH = 1 << 12  # candidates weighed at once
# bits of a float, the integer of that size, and the pattern of +inf
_PATTERNS = {
    torch.bfloat16: (16, torch.int16, 0x7F80),
    torch.float16: (16, torch.int16, 0x7C00),
    torch.float32: (32, torch.int32, 0x7F80_0000),
    torch.float64: (64, torch.int64, 0x7FF0_0000_0000_0000),
}


def kept_floor(z: Tensor, shard: VocabShard) -> Tensor:
    """Find the smallest logit that each row keeps, [T, 1] in z's dtype, −inf if all stay; for any split.

    >>> from parallel_rl.vocab.shards import VocabShard
    >>> from parallel_rl.vocab.shards import Truncation
    >>> kept_floor(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), VocabShard(0, 4, 4, truncation=Truncation(top_k=2)))
    tensor([[3.]])

    Args:
        z: [T, W] the shard's real columns.
    """
    rule, vocab_size = shard.truncation, shard.vocab_size
    top_k = None if rule.top_k is None or rule.top_k >= vocab_size else rule.top_k
    top_p = None if rule.top_p is None or rule.top_p >= 1 else rule.top_p
    if (top_k is None and top_p is None) or not len(z):
        return torch.full((len(z), 1), -torch.inf, dtype=z.dtype, device=z.device)
    inv_t = shard.inverse_temperature(torch.float64, z.device)
    search = _Search(top_k, top_p, inv_t, vocab_size, shard.group, shard.backend)
    if runs_on_triton(z, shard.backend):
        return search.by_kernels(z).to(z.dtype)
    if top_p is None or z.device.type != "cpu" or torch.compiler.is_compiling():
        return search.in_logits(z).to(z.dtype)
    floor = search.in_candidates(z)
    missed = floor.isinf()[:, 0].nonzero()[:, 0]  # the same rows on every rank
    if len(missed) == len(z):
        floor = search.in_logits(z)
    elif len(missed):
        floor[missed] = search.of_rows(missed).in_logits(z[missed])
    return floor.to(z.dtype)


class _Search(NamedTuple):
    """Search for the thresholds [T, 1] of some rows, in the dtype of the mathematics."""

    top_k: int | None
    top_p: float | None
    inv_t: Tensor  # [T, 1] or [1, 1] float64
    vocab_size: int
    group: ProcessGroup | None
    backend: Backend

    def of_rows(self, rows: Tensor) -> _Search:
        return self if len(self.inv_t) == 1 else self._replace(inv_t=self.inv_t[rows])

    def in_logits(self, z: Tensor) -> Tensor:
        """Read all logits for each digit, without waiting for a value."""
        floor = torch.full((len(z), 1), -torch.inf, dtype=math_dtype(z.dtype), device=z.device)
        if self.top_k is not None:
            k = torch.full((len(z), 1), self.top_k, device=z.device)
            floor = _digits(partial(_held, _counts, z, self.backend, ()), lambda _: k, z, self.group)
        if self.top_p is not None:
            top = z.amax(1, keepdim=True) if z.shape[1] else floor
            rest = (floor, *self.scale(top))
            floor = _digits(partial(_held, _masses, z, self.backend, rest), self.fraction, z, self.group)
        return floor

    def in_candidates(self, z: Tensor) -> Tensor:
        """Read all logits twice and a few per digit; ±inf for a row whose few do not hold the threshold."""
        assert self.top_p is not None
        brackets = find_brackets(z, self.top_k, self.top_p, self.inv_t, self.vocab_size, self.group)
        scale, all_stay = self.scale(brackets.largest), torch.full_like(brackets.largest, -torch.inf)
        low, high = (torch.cat(ends, 1) for ends in zip(*brackets.brackets, strict=True))
        above = torch.zeros(len(z), 4, dtype=torch.int64)
        weigh = compiled(_weigh) if _pays(z, self.backend) else _weigh

        def weigh_above(rows: slice) -> None:
            above[rows, :3] = weigh(z[rows], high[rows], *(rows_of(x, rows) for x in scale))

        copies = copy_candidates(z, low, high, weigh_above)
        above[:, 3:] = torch.cat([x.overflow for x in copies], 1).sum(1, keepdim=True)
        local = above
        above = reduce_(above.clone(), self.group)
        floor, total, missed = all_stay, above[:, 1:2], above[:, 3:] > 0
        if self.top_k is not None:
            k, values = torch.full_like(total, self.top_k), copies[0].values
            floor = _digits(partial(_held_above, values, local[:, :1], ()), lambda _: k, values, self.group)
            kept = _held_above(values, torch.zeros_like(total), (all_stay, *scale), floor)
            total, missed = total + reduce_(kept, self.group), missed | floor.isinf()
        wanted, values = self.fraction(total), copies[-1].values
        held = partial(_held_above, values, local[:, 2:3], (floor, *scale))
        return torch.where(missed, torch.inf, _digits(held, lambda _: wanted, values, self.group))

    def by_kernels(self, z: Tensor) -> Tensor:
        """Read all logits twice and a few per digit, or all of a row whose few do not hold its threshold."""
        from parallel_rl.vocab.backends.triton.threshold import vocab_held, vocab_weigh

        if self.top_p is None:
            assert self.top_k is not None
            k = torch.full((len(z), 1), self.top_k, device=z.device)
            none = torch.zeros_like(k)
            everywhere = partial(vocab_held, z, none == 0, z[:, :0], none.int(), none, ())
            return _digits(everywhere, lambda _: k, z, self.group)
        brackets = count_brackets(z, self.top_k, self.top_p, self.inv_t, self.vocab_size, self.group)
        scale, all_stay = self.scale(brackets.largest), torch.full_like(brackets.largest, -torch.inf)
        low, high = (torch.cat(ends, 1) for ends in zip(*brackets.brackets, strict=True))
        most = capacity(z.shape[1])
        local, values, number = vocab_weigh(z, low, high, *scale, most)
        sums = reduce_(torch.cat([local, (number > most).t()], 1), self.group)
        above_k, from_k, total, above_p, from_p = sums[:, :5, None].unbind(1)

        def among(bracket: int, missed: Tensor, column: int, rest: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
            above = local[:, column : column + 1].masked_fill(missed, 0)
            return partial(vocab_held, z, missed, values[bracket], number[bracket], above, rest)

        floor = all_stay
        if self.top_k is not None:
            k = torch.full_like(total, self.top_k)
            missed = (sums[:, 5:6] > 0) | (above_k >= k) | (from_k < k)  # the same rows on every rank
            floor = _digits(among(0, missed, 0, ()), lambda _: k, z, self.group)
            kept = among(0, missed, 2, (all_stay, *scale))(floor.repeat(1, 1 << _DIGIT))
            total = reduce_(kept[:, :1].contiguous(), self.group)
        wanted = self.fraction(total)
        missed = (sums[:, -1:] > 0) | (above_p >= wanted) | (from_p < wanted)
        return _digits(among(-1, missed, 3, (floor, *scale)), lambda _: wanted, z, self.group)

    def scale(self, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (the row's maximum, 1/temperature, the largest mass), [T, 1] or [1, 1]."""
        top = reduce_(largest.double(), self.group, dist.ReduceOp.MAX)
        bits = 62 - max(1, (self.vocab_size - 1).bit_length())  # the sum of V masses of at most 2^bits fits
        unit = torch.full((1, 1), 2.0**bits, dtype=torch.float64, device=top.device)
        return torch.where(top == -torch.inf, 0.0, top), self.inv_t.expand(len(top), 1).contiguous(), unit

    def fraction(self, total: Tensor) -> Tensor:
        assert self.top_p is not None
        return (total.double() * self.top_p).ceil().to(torch.int64).minimum(total).clamp(min=1)


def _digits(
    held: Callable[[Tensor], Tensor], target: Callable[[Tensor], Tensor], z: Tensor, group: ProcessGroup | None
) -> Tensor:
    """Find [T, 1] the largest τ with H(τ) ≥ target(H(−inf)); `held` is this shard's H at pivots [T, 8]."""
    bits, integers, infinity = _PATTERNS[z.dtype]

    def floats(key: Tensor) -> Tensor:
        """Convert integers in float order, without NaN patterns, to floats."""
        key = key.clamp(-infinity - 1, infinity)
        pattern = torch.where(key < 0, key ^ ((1 << (bits - 1)) - 1), key)
        return pattern.to(integers).view(z.dtype).to(math_dtype(z.dtype))

    key = torch.full((z.shape[0], 1), -(1 << (bits - 1)), dtype=torch.int64, device=z.device)
    digits = torch.arange(1 << _DIGIT, device=z.device)
    wanted: Tensor | None = None
    # the last digit may overlap the one before: what lies above the threshold fails the test again
    for shift in (*range(bits - _DIGIT, 0, -_DIGIT), 0):
        # wraps around to the right key if the shift overflows
        sums = reduce_(held(floats(key + (digits << shift))), group)
        if wanted is None:
            wanted = target(sums[:, :1])  # the very first pivot is −inf
        key = key + ((sums[:, 1:] >= wanted).sum(1, keepdim=True) << shift)
    return floats(key)


def _held(
    function: Callable[..., Tensor], z: Tensor, backend: Backend, rest: tuple[Tensor, ...], pivots: Tensor
) -> Tensor:
    if not z.numel():
        return torch.zeros(pivots.shape, dtype=torch.int64, device=z.device)
    if _pays(z, backend):
        return compiled(function)(z, pivots, *rest)
    operands = (z, pivots, *rest)
    return torch.cat([function(*(rows_of(x, rows) for x in operands)) for rows in row_blocks(z)])


def _held_above(values: Tensor, base: Tensor, rest: tuple[Tensor, ...], pivots: Tensor) -> Tensor:
    """Add to `base` [T, 1] the number, or with `rest` the mass, of ascending values from each pivot on."""
    held = []
    for rows in even_blocks(values, _SCRATCH):
        part = values[rows]
        at = torch.searchsorted(part, pivots[rows].to(part.dtype))
        if rest:
            sums = _mass(part, *(rows_of(x, rows) for x in rest)).cumsum_(1)
            held.append(sums[:, -1:] - torch.where(at > 0, sums.gather(1, (at - 1).clamp_(min=0)), 0))
        else:
            held.append(part.shape[1] - at)
    return base + torch.cat(held)


def _weigh(z: Tensor, high: Tensor, top: Tensor, inv_t: Tensor, scale: Tensor) -> Tensor:
    """Weigh the logits above the brackets of top-k (optional) and top-p; upper ends [T, 1 or 2].

    Returns:
        [T, 3]: the count above the first; their mass, or without top-k the total; the mass above the last.
    """
    mass = _mass(z, torch.full_like(high[:, :1], -torch.inf), top, inv_t, scale)
    z = z.to(high.dtype)
    first, last = z >= high[:, :1], z >= high[:, -1:]
    of_first = mass if high.shape[1] == 1 else torch.where(first, mass, 0)
    number = first.sum(1, dtype=torch.int32).long()
    return torch.stack([number, of_first.sum(1), torch.where(last, mass, 0).sum(1)], 1)


def _pays(z: Tensor, backend: Backend) -> bool:
    """Return whether passes over these logits, or blocks of their rows, run compiled."""
    return (backend == "auto" and z.numel() >= _COMPILE_FROM and compiler_works(z.device.type)) or compiles(z, backend)


def _counts(z: Tensor, pivots: Tensor) -> Tensor:
    z = z.to(pivots.dtype)
    return torch.stack([(z >= pivot[:, None]).sum(1, dtype=torch.int32) for pivot in pivots.unbind(1)], 1).long()


def _masses(z: Tensor, pivots: Tensor, floor: Tensor, top: Tensor, inv_t: Tensor, scale: Tensor) -> Tensor:
    mass = _mass(z, floor, top, inv_t, scale)
    z = z.to(pivots.dtype)
    return torch.stack([torch.where(z >= pivot[:, None], mass, 0).sum(1) for pivot in pivots.unbind(1)], 1)


def _mass(z: Tensor, floor: Tensor, top: Tensor, inv_t: Tensor, scale: Tensor) -> Tensor:
    # in float64: another rounding of e^x, for another shard width, must not move a threshold
    mass = (((z.double() - top) * inv_t).exp() * scale).to(torch.int64)
    return torch.where(z.to(floor.dtype) >= floor, mass, 0)
