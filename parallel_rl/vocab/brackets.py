"""Narrow a row's top-p/top-k threshold to a few candidate logits in two passes.

The first pass weighs each row by bins; one all-reduce finds the threshold's bin. The second copies that bin's logits, about
a hundredth of the row, and sums exactly those above. Bins are inexact float32 sums: the caller searches rows whose threshold
is not among the copies, or with too many equal logits. A CPU copies any number of logits, a card a fixed number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from parallel_rl.groups import reduce_
from parallel_rl.segments import running_sum
from parallel_rl.vocab.backends.torch_backend import even_blocks, math_dtype, rows_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_BINS = 126  # plus one above and one below: a card counts in a power of two
_SAMPLES = 64, 4  # spans of a shard that place the bins, columns of each
_MOST = 32  # at most every 32nd column of a shard is copied
_ROOM = 64  # on a card brackets hold a 64th of the vocabulary
_BIN_SCRATCH = 1 << 14  # logits binned at once
_COPY_SCRATCH = 1 << 16  # logits searched at once
_NO_MASS = 33.0  # nats below the largest logit where a mass of 2^-47 rounds to zero
_OFF = 1e-4  # tolerance of the bins' sums


class Bracket(NamedTuple):
    """Bounds of the rows' thresholds, low ≤ τ < high, [T, 1] each."""

    low: Tensor
    high: Tensor


class Brackets(NamedTuple):
    """Brackets of the thresholds of top-k (optional) and top-p, and the first pass's maximum."""

    brackets: list[Bracket]
    largest: Tensor  # [T, 1] logit of this shard


class Candidates(NamedTuple):
    """Logits of a shard inside a bracket."""

    values: Tensor  # [T, C] ascending, −inf first in rows with fewer
    overflow: Tensor  # [T, 1] bool: a row has too many, and none is copied


class _Bins(NamedTuple):
    """Each row's bins from large to small over a window: the first lies above it, the last below."""

    end: Tensor  # [T, 1] upper end of the window
    rate: Tensor  # [T, 1] bins per unit of logits

    def numbers(self, x: Tensor, rows: slice) -> Tensor:
        """Return the bins of logits minus `end`; NaN is in the first."""
        return (x * -self.rate[rows]).add_(1).clamp_(0, _BINS + 1).to(torch.int64).clamp_(min=0)

    def bracket(self, first: Tensor, last: Tensor) -> Bracket:
        """Return the bracket of the bins from `first` to `last`, [T, 1] each, slightly widened for rounding.

        A fraction cuts a bin: from 2.5 begins in the middle of bin 2, to 2.5 ends in the middle of bin 3.
        """
        high = torch.where(first < 1, torch.inf, self.end - (first - 1.01) / self.rate)
        low = torch.where(last > _BINS, -torch.inf, self.end - (last + 0.01) / self.rate)
        infinity = torch.full_like(low, torch.inf)
        return Bracket(low.nextafter(-infinity), high.nextafter(infinity))


def find_brackets(
    z: Tensor, top_k: int | None, top_p: float, inv_t: Tensor, vocab_size: int, group: ProcessGroup | None
) -> Brackets:
    """Find probable brackets of top-p's threshold, and top-k's before it: one read, two all-reduces."""
    # the ids from the threshold down hold at least 1 − p of the mass, so the threshold's own holds a V-th of that
    bins = _window(z, min(_NO_MASS, math.log(vocab_size / (1 - top_p)) + 1) / inv_t, group)
    sums = torch.zeros(1 if top_k is None else 2, len(z), _BINS + 2)
    largest, unit = torch.full_like(bins.end, -torch.inf), torch.ones(1, 1)
    for rows in even_blocks(z, _BIN_SCRATCH):
        for part in z[rows].split(_BIN_SCRATCH, 1) if z.shape[1] else ():
            x = part.to(bins.end.dtype)
            largest[rows] = torch.maximum(largest[rows], x.amax(1, keepdim=True))
            x = x - bins.end[rows]
            number = bins.numbers(x, rows)
            mass = x.mul_(rows_of(inv_t, rows)).exp_()
            sums[0, rows].scatter_add_(1, number, mass.to(sums.dtype))
            if top_k is not None:
                sums[1, rows].scatter_add_(1, number, unit.expand(number.shape))
    reduce_(sums, group)
    held, brackets = sums[0].cumsum_(1), []
    low = high = held[:, -1:]
    if top_k is not None:  # the rest exceeds what lies above its threshold's bin
        at = _reaches(sums[1].cumsum_(1), torch.full_like(low, top_k))
        brackets.append(bins.bracket(at, at))
        high, low = held.gather(1, at), torch.where(at > 0, held.gather(1, (at - 1).clamp(min=0)), 0.0)
    first, last = _reaches(held, low * (top_p * (1 - _OFF))), _reaches(held, high * (top_p * (1 + _OFF)))
    return Brackets([*brackets, bins.bracket(first, last)], largest)


def count_brackets(
    z: Tensor, top_k: int | None, top_p: float, inv_t: Tensor, vocab_size: int, group: ProcessGroup | None
) -> Brackets:
    """Find brackets by counting, on a card cheaper than weighing: one read, two all-reduces.

    A bin's mass is estimated from its middle, so a bracket includes ids around the apparent threshold, of any mass.
    """
    from parallel_rl.vocab.backends.triton.threshold import vocab_bins

    # the k-th id may have little mass
    reach = _NO_MASS if top_k else min(_NO_MASS, math.log(vocab_size / (1 - top_p)) + 1)
    bins = _window(z, reach / inv_t, group)
    sums, largest = vocab_bins(z, bins.end, bins.rate, inv_t.expand(len(z), 1).contiguous(), _BINS + 2)
    reduce_(sums, group)
    inner, total, below = sums[:, : _BINS + 1], sums[:, -2:-1], sums[:, -1:]
    counts = torch.cat([inner, vocab_size - inner.sum(1, keepdim=True)], 1)
    middle = torch.arange(_BINS, device=z.device) + 0.5
    mass = torch.cat([counts[:, 1:-1] * (middle / -bins.rate * inv_t).exp().to(counts.dtype), below], 1)
    mass = torch.cat([(total - mass.sum(1, keepdim=True)).clamp(min=0), mass], 1)
    up_to, from_below = running_sum(torch.stack([counts, mass.flip(1)]))
    tail = from_below.flip(1)
    brackets, cut = [], torch.zeros_like(total)
    if top_k is not None:
        at, place = (up_to < top_k).sum(1, keepdim=True), torch.full_like(total, top_k)
        brackets.append(_around(bins, counts, up_to, at, place, vocab_size))
        beyond = (up_to.gather(1, at) - place) / counts.gather(1, at).clamp(min=1)
        cut = tail.gather(1, at) - mass.gather(1, at) * (1 - beyond)
    wanted = cut + (total - cut) * (1 - top_p)
    at = (tail[:, 1:] >= wanted).sum(1, keepdim=True)
    of_bin = mass.gather(1, at)
    fraction = (wanted - tail.gather(1, at) + of_bin) / of_bin.clamp(min=torch.finfo(mass.dtype).tiny)
    place = up_to.gather(1, at) - fraction.clamp(0, 1) * counts.gather(1, at)
    return Brackets([*brackets, _around(bins, counts, up_to, at, place, vocab_size)], largest)


def _around(bins: _Bins, counts: Tensor, up_to: Tensor, at: Tensor, place: Tensor, vocab_size: int) -> Bracket:
    """Find the bracket around the `place`-th id [T, 1] in bin `at`, made of whole bins if they are small."""
    half = (32 + vocab_size // _ROOM) / 2

    def end(wanted: Tensor, outward: float) -> Tensor:
        number = (up_to < wanted).sum(1, keepdim=True).clamp(max=_BINS + 1)
        count = counts.gather(1, number)
        part = ((wanted - up_to.gather(1, number) + count) / count.clamp(min=1)).clamp(0, 1)
        part = torch.where((count <= half) | (number == 0) | (number > _BINS), outward, part)
        # another bin this full holds equal logits, or all the rest
        return number + torch.where((count > 4 * half) & (number != at), 1 - outward, part)

    first, last = end(place - half, 0.0), end(place + half, 1.0) - 1
    small = counts.gather(1, at) <= 2 * half
    return bins.bracket(torch.where(small, first.minimum(at), first), torch.where(small, last.maximum(at), last))


def capacity(width: int) -> int:
    """Return how many of a row's logits may be copied, twice what `count_brackets` looks for."""
    return 64 + 2 * width // _ROOM


def _reaches(sums: Tensor, wanted: Tensor) -> Tensor:
    """Return the first bin [T, 1] where running sums [T, bins] reach `wanted`, or the last."""
    return torch.searchsorted(sums, wanted).clamp_(max=_BINS + 1)


def _window(z: Tensor, reach: Tensor, group: ProcessGroup | None) -> _Bins:
    """Lay the bins over the range of sampled columns, from its upper end at most `reach` [T or 1, 1] down."""
    ends = torch.full((len(z), 2), -torch.inf, dtype=math_dtype(z.dtype), device=z.device)
    if z.shape[1]:
        spans, columns = _SAMPLES
        span = max(1, z.shape[1] // spans)
        sampled = z[:, : z.shape[1] // span * span].unflatten(1, (-1, span))[..., :columns].flatten(1)
        ends = torch.cat([sampled.amax(1, True), sampled.amin(1, True).neg_()], 1).to(ends.dtype)
    reduce_(ends, group, dist.ReduceOp.MAX)
    end, width = ends[:, :1], ends.sum(1, keepdim=True)
    width = width.minimum(reach.to(width.dtype))
    rate = _BINS / torch.where(width.isfinite() & (width > 0), width, 1.0)
    return _Bins(torch.where(end.isfinite(), end, 0.0), rate)


def copy_candidates(z: Tensor, low: Tensor, high: Tensor, on_rows: Callable[[slice], None]) -> list[Candidates]:
    """Copy the logits in each bracket [T, brackets] and call `on_rows` per block of rows: one read."""
    most = max(64, z.shape[1] // _MOST)
    copies: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(low.shape[1])]
    for rows in even_blocks(z, _COPY_SCRATCH, least=4):
        on_rows(rows)
        for index, parts in enumerate(copies):
            inside = z[rows] >= low[rows, index : index + 1]
            inside &= z[rows] < high[rows, index : index + 1]
            row, column = inside.nonzero(as_tuple=True)
            count = torch.bincount(row, minlength=len(inside))[:, None]  # `inside.sum` would copy it as int64
            if bool((count > most).any()):
                few = (count[row] <= most)[:, 0]
                row, column = row[few], column[few]
            parts.append((z[rows][row, column], count))
    return [_ordered(parts, most) for parts in copies]


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
        parts[index] = parts[index][0][:0], count  # frees its memory
        del part
    return Candidates(values, overflow)
