"""The few logits of a row among which its threshold lies, from two reads, on a CPU: values may be looked at without waiting.

The first read weighs each row by bins, of which one all-reduce tells in which the threshold lies. The second copies the logits
of that bin, about a hundredth of the row, while the caller sums exactly what lies above. Bins are float32 sums and need not
be right: a threshold that turns out not to be among the copies, and a row with too many equal logits to copy them, are left
for the caller to search in the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from parallel_rl.groups import group_size
from parallel_rl.vocab.backends.torch_backend import even_blocks, math_dtype, rows_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_BINS = 128
_SAMPLES = 256  # columns of a shard that the bins are laid over
_MOST = 32  # at most every 32nd column of a shard is copied
_BIN_SCRATCH = 1 << 14  # logits whose bins are found at once
_COPY_SCRATCH = 1 << 16  # logits that are looked through at once
_NO_MASS = 33.0  # nats below the largest logit where a mass of 2^-47 rounds to zero
_OFF = 1e-4  # what the bins' sums may be off by


class Bracket(NamedTuple):
    """Where the thresholds of the rows lie, low ≤ τ < high, [T, 1] each."""

    low: Tensor
    high: Tensor


class Brackets(NamedTuple):
    """Brackets of the threshold of top-k, if it asks, and of top-p, and what else the first read tells."""

    each: list[Bracket]
    largest: Tensor  # [T, 1] logit of this shard


class Candidates(NamedTuple):
    """The logits of a shard inside a bracket."""

    values: Tensor  # [T, C] ascending, −inf first where a row has fewer
    overflow: Tensor  # [T, 1] bool: a row has too many, and none is here


class _Bins(NamedTuple):
    """Each row's logits in bins from large to small, over a window: the first bin is above it, the last one below."""

    end: Tensor  # [T, 1] upper end of the window
    rate: Tensor  # [T, 1] bins per unit of logits

    def numbers(self, x: Tensor, rows: slice) -> Tensor:
        """The bins of logits less `end`; NaN is in the first."""
        return (x * -self.rate[rows]).add_(1).clamp_(0, _BINS + 1).to(torch.int64).clamp_(min=0)

    def bracket(self, first: Tensor, last: Tensor) -> Bracket:
        """The logits of the bins from `first` to `last`, [T, 1] each, and a little more for rounding."""
        high = torch.where(first == 0, torch.inf, self.end - (first - 1.01) / self.rate)
        low = torch.where(last > _BINS, -torch.inf, self.end - (last + 0.01) / self.rate)
        infinity = torch.full_like(low, torch.inf)
        return Bracket(low.nextafter(-infinity), high.nextafter(infinity))


def find_brackets(
    z: Tensor, top_k: int | None, top_p: float, inv_t: Tensor, vocab_size: int, group: ProcessGroup | None
) -> Brackets:
    """Find where the threshold of top-p, and of top-k before it, probably lies: one read and two all-reduces."""
    # All words from the threshold down hold 1 − p of the mass or more, so the threshold's own holds a V-th of that.
    bins = _window(z, min(_NO_MASS, math.log(vocab_size / (1 - top_p)) + 1) / inv_t, group)
    sums = torch.zeros(1 if top_k is None else 2, len(z), _BINS + 2)
    largest, one = torch.full_like(bins.end, -torch.inf), torch.ones(1, 1)
    for rows in even_blocks(z, _BIN_SCRATCH):
        for part in z[rows].split(_BIN_SCRATCH, 1) if z.shape[1] else ():
            x = part.to(bins.end.dtype)
            largest[rows] = torch.maximum(largest[rows], x.amax(1, keepdim=True))
            x = x - bins.end[rows]
            number = bins.numbers(x, rows)
            mass = x.mul_(rows_of(inv_t, rows)).exp_()
            sums[0, rows].scatter_add_(1, number, mass.to(sums.dtype))
            if top_k is not None:
                sums[1, rows].scatter_add_(1, number, one.expand(number.shape))
    if group_size(group) > 1:
        dist.all_reduce(sums, group=group)
    held, found = sums[0].cumsum_(1), []
    low = high = held[:, -1:]
    if top_k is not None:  # what it leaves is more than what lies above the bin of its threshold
        at = _reaches(sums[1].cumsum_(1), torch.full_like(low, top_k))
        found.append(bins.bracket(at, at))
        high, low = held.gather(1, at), torch.where(at > 0, held.gather(1, (at - 1).clamp(min=0)), 0.0)
    first, last = _reaches(held, low * (top_p * (1 - _OFF))), _reaches(held, high * (top_p * (1 + _OFF)))
    return Brackets([*found, bins.bracket(first, last)], largest)


def _reaches(sums: Tensor, wanted: Tensor) -> Tensor:
    """The first bin [T, 1] at which running sums [T, bins] are what is wanted, or the last."""
    return torch.searchsorted(sums, wanted).clamp_(max=_BINS + 1)


def _window(z: Tensor, reach: Tensor, group: ProcessGroup | None) -> _Bins:
    """Lay the bins over the range of some columns, from its upper end `reach` [T or 1, 1] down at most."""
    some = z[:, :: max(1, z.shape[1] // _SAMPLES)]
    ends = torch.full((len(z), 2), -torch.inf, dtype=math_dtype(z.dtype))
    if z.shape[1]:
        ends = torch.cat([some.amax(1, True), some.amin(1, True).neg_()], 1).to(ends.dtype)
    if group_size(group) > 1:
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    end, width = ends[:, :1], ends.sum(1, keepdim=True)
    width = width.minimum(reach.to(width.dtype))
    rate = _BINS / torch.where(width.isfinite() & (width > 0), width, 1.0)
    return _Bins(torch.where(end.isfinite(), end, 0.0), rate)


def copy_candidates(z: Tensor, low: Tensor, high: Tensor, beside: Callable[[slice], None]) -> list[Candidates]:
    """Copy the logits inside each bracket [T, brackets], and call `beside` with each block of rows: one read."""
    most = max(64, z.shape[1] // _MOST)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(low.shape[1])]
    for rows in even_blocks(z, _COPY_SCRATCH, least=4):
        beside(rows)
        for index, parts in enumerate(found):
            inside = z[rows] >= low[rows, index : index + 1]
            inside &= z[rows] < high[rows, index : index + 1]
            row, column = inside.nonzero(as_tuple=True)
            count = torch.bincount(row, minlength=len(inside))[:, None]  # `inside.sum` would copy it as int64
            if bool((count > most).any()):
                few = (count[row] <= most)[:, 0]
                row, column = row[few], column[few]
            parts.append((z[rows][row, column], count))
    return [_ordered(parts, most) for parts in found]


def _ordered(parts: list[tuple[Tensor, Tensor]], most: int) -> Candidates:
    counts = torch.cat([count for _, count in parts])
    overflow = counts > most
    width = max(1, int(counts.masked_fill(overflow, 0).max()))
    values = parts[0][0].new_empty(len(counts), width)
    at = 0
    for index, (part, count) in enumerate(parts):
        rows = values[at : at + len(count)].fill_(-torch.inf)
        rows[torch.arange(width) >= width - count.masked_fill(count > most, 0)] = part
        rows.copy_(rows.sort(1).values)
        at += len(count)
        parts[index] = parts[index][0][:0], count  # its memory
        del part
    return Candidates(values, overflow)
