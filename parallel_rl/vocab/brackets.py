"""The few logits of a row among which its threshold lies, from two reads.

The first read weighs each row by bins, of which one all-reduce tells in which the threshold lies. The second copies the logits
of that bin, about a hundredth of the row, while exactly what lies above is summed. Bins are float32 sums and need not
be right: a threshold that turns out not to be among the copies, and a row with too many equal logits to copy them, are left
for the caller to search in the logits.

On a CPU values may be looked at without waiting, and as many logits are copied as there are. On a card the kernels of
`backends.triton.threshold` read, and copy to places of a fixed number.
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

_BINS = 126  # and one above them, one below: a card counts in a power of two
_SAMPLES = 64, 4  # spans of a shard that the bins are laid over, columns of each
_MOST = 32  # at most every 32nd column of a shard is copied
_ROOM = 64  # on a card brackets are to hold a 64th of the words
_BIN_SCRATCH = 1 << 14  # logits whose bins are found at once
_COPY_SCRATCH = 1 << 16  # logits that are looked through at once
_NO_MASS = 33.0  # nats below the largest logit where a mass of 2^-47 rounds to zero
_OFF = 1e-4  # what the bins' sums may be off by


class Bracket(NamedTuple):
    """Bounds of the thresholds of the rows, low ≤ τ < high, [T, 1] each."""

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
        """The logits of the bins from `first` to `last`, [T, 1] each, and a little more for rounding.

        2.5 as the first leaves out half of bin 2, as the last it takes in half of bin 3.
        """
        high = torch.where(first < 1, torch.inf, self.end - (first - 1.01) / self.rate)
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
    reduce_(sums, group)
    held, found = sums[0].cumsum_(1), []
    low = high = held[:, -1:]
    if top_k is not None:  # what it leaves is more than what lies above the bin of its threshold
        at = _reaches(sums[1].cumsum_(1), torch.full_like(low, top_k))
        found.append(bins.bracket(at, at))
        high, low = held.gather(1, at), torch.where(at > 0, held.gather(1, (at - 1).clamp(min=0)), 0.0)
    first, last = _reaches(held, low * (top_p * (1 - _OFF))), _reaches(held, high * (top_p * (1 + _OFF)))
    return Brackets([*found, bins.bracket(first, last)], largest)


def count_brackets(
    z: Tensor, top_k: int | None, top_p: float, inv_t: Tensor, vocab_size: int, group: ProcessGroup | None
) -> Brackets:
    """Find brackets by a kernel that counts logits, which is cheaper on a card than weighing them: one read, two all-reduces.

    A bin's mass is about that of as many words in its middle. That is off by some percent where few words make it, so that a
    bracket takes in a number of words around the place where the threshold seems to lie, whatever their mass.
    """
    from parallel_rl.vocab.backends.triton.threshold import vocab_bins

    # the k-th word may have little mass
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
    found, cut = [], torch.zeros_like(total)
    if top_k is not None:
        at, place = (up_to < top_k).sum(1, keepdim=True), torch.full_like(total, top_k)
        found.append(_around(bins, counts, up_to, at, place, vocab_size))
        beyond = (up_to.gather(1, at) - place) / counts.gather(1, at).clamp(min=1)
        cut = tail.gather(1, at) - mass.gather(1, at) * (1 - beyond)
    wanted = cut + (total - cut) * (1 - top_p)
    at = (tail[:, 1:] >= wanted).sum(1, keepdim=True)
    of_bin = mass.gather(1, at)
    share = (wanted - tail.gather(1, at) + of_bin) / of_bin.clamp(min=torch.finfo(mass.dtype).tiny)
    place = up_to.gather(1, at) - share.clamp(0, 1) * counts.gather(1, at)
    return Brackets([*found, _around(bins, counts, up_to, at, place, vocab_size)], largest)


def _around(bins: _Bins, counts: Tensor, up_to: Tensor, at: Tensor, place: Tensor, vocab_size: int) -> Bracket:
    """Find the bracket around the `place`-th word [T, 1], of whole bins where they are small; it is in the bin `at`."""
    half = (32 + vocab_size // _ROOM) / 2

    def end(wanted: Tensor, outward: float) -> Tensor:
        number = (up_to < wanted).sum(1, keepdim=True).clamp(max=_BINS + 1)
        count = counts.gather(1, number)
        part = ((wanted - up_to.gather(1, number) + count) / count.clamp(min=1)).clamp(0, 1)
        part = torch.where((count <= half) | (number == 0) | (number > _BINS), outward, part)
        # another one so full is of equal words, or of all the rest
        return number + torch.where((count > 4 * half) & (number != at), 1 - outward, part)

    first, last = end(place - half, 0.0), end(place + half, 1.0) - 1
    small = counts.gather(1, at) <= 2 * half
    return bins.bracket(torch.where(small, first.minimum(at), first), torch.where(small, last.maximum(at), last))


def capacity(width: int) -> int:
    """The number of a row's logits that may be copied from a shard so wide, twice what `count_brackets` looks for."""
    return 64 + 2 * width // _ROOM


def _reaches(sums: Tensor, wanted: Tensor) -> Tensor:
    """The first bin [T, 1] at which running sums [T, bins] are what is wanted, or the last."""
    return torch.searchsorted(sums, wanted).clamp_(max=_BINS + 1)


def _window(z: Tensor, reach: Tensor, group: ProcessGroup | None) -> _Bins:
    """Lay the bins over the range of some columns, from its upper end `reach` [T or 1, 1] down at most."""
    ends = torch.full((len(z), 2), -torch.inf, dtype=math_dtype(z.dtype), device=z.device)
    if z.shape[1]:
        spans, columns = _SAMPLES
        span = max(1, z.shape[1] // spans)
        some = z[:, : z.shape[1] // span * span].unflatten(1, (-1, span))[..., :columns].flatten(1)
        ends = torch.cat([some.amax(1, True), some.amin(1, True).neg_()], 1).to(ends.dtype)
    reduce_(ends, group, dist.ReduceOp.MAX)
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
