"""Find a row's threshold with Triton, see `parallel_rl.vocab.threshold`: the kernels, and their torch operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_rl.vocab.backends.choice import Tiling, cut, tiling
from parallel_rl.vocab.backends.triton.kernels import _columns, _in_lanes
from parallel_rl.vocab.backends.triton.operators import on_device, processors

# mypy: disable-error-code="no-untyped-def"


_LOG2_E = tl.constexpr(1.4426950408889634)
_MOST_BITS = tl.constexpr(100.0)  # bits of a mass: an id far above the window must not make a row's sum infinite


@triton.jit
def _part(split, columns_per_program, width, BLOCK: tl.constexpr, PER_LANE: tl.constexpr, ALIGNED_ENDS: tl.constexpr):
    """Return start, end of whole tiles, and end of a program's part of the row."""
    first = split * columns_per_program
    last = tl.minimum(first + columns_per_program, _in_lanes(width, PER_LANE, ALIGNED_ENDS))
    return first, first + (last - first) // BLOCK * BLOCK, last


@triton.jit
def _count_tile(z, end, rate, step, counts, total, below, largest, BINS: tl.constexpr):
    x = z - end
    number = tl.minimum(tl.maximum(1.0 - x * rate, 0.0), BINS - 1.0).to(tl.int32)
    flat = tl.reshape(number, [z.shape[0] * z.shape[1]])
    counts += tl.histogram(flat, BINS, flat < BINS - 1)  # with a common id, nearly all are below
    mass = tl.exp2(tl.minimum(x * step, _MOST_BITS))
    total += tl.sum(mass, 1)
    below += tl.sum(tl.where(number == BINS - 1, mass, 0.0), 1)
    return counts, total, below, tl.maximum(largest, z)


@triton.jit(do_not_specialize=["tokens"])
def bins_kernel(
    logits, end, rate, inv_t, parts, width, tokens, row_stride, column_stride, columns_per_program,
    BINS: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr, ALIGNED_ROWS: tl.constexpr, ALIGNED_ENDS: tl.constexpr,
):  # fmt: skip
    """Count logits of a row's part per bin except the last, with total mass, the last's, and the maximum."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCK: tl.constexpr = LANES * PER_LANE
    first, full_end, last = _part(split, columns_per_program, width, BLOCK, PER_LANE, ALIGNED_ENDS)
    z_row = logits + _in_lanes(row * row_stride, PER_LANE, ALIGNED_ROWS)
    columns = _columns(LANES, PER_LANE, ALIGNED_ROWS)
    top, bins_per_unit = tl.load(end + row), tl.load(rate + row)
    step = (tl.load(inv_t + row) * _LOG2_E).to(tl.float32)

    counts = tl.zeros([BINS], tl.int32)
    total = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)
    largest = tl.full([LANES, PER_LANE], float("-inf"), tl.float32)  # Triton 3.6 fails on a running maximum of loads
    for at in range(first, full_end, BLOCK):
        z = tl.load(z_row + (at + columns) * column_stride).to(tl.float32)
        counts, total, below, largest = _count_tile(z, top, bins_per_unit, step, counts, total, below, largest, BINS)
    if full_end < last:
        inside = columns < last - full_end
        z = tl.load(z_row + (full_end + columns) * column_stride, mask=inside, other=float("-inf")).to(tl.float32)
        counts, total, below, largest = _count_tile(z, top, bins_per_unit, step, counts, total, below, largest, BINS)
    out = parts + (split.to(tl.int64) * tokens + row) * (BINS + 3)
    tl.store(out + tl.arange(0, BINS), counts.to(tl.float32))
    tl.store(out + BINS, tl.sum(total, 0))
    tl.store(out + BINS + 1, tl.sum(below, 0))
    tl.store(out + BINS + 2, tl.max(tl.max(largest, 1), 0))


@triton.jit
def _mass(z, top, inv_t, unit):
    return (tl.exp((z.to(tl.float64) - top) * inv_t) * unit).to(tl.int64)


@triton.jit
def _copy_tile(z, inside, copied, values, capacity):
    """Store the logits inside, in any order: the search among them uses integer sums."""
    number = inside.to(tl.int32)
    up_to = tl.cumsum(number, 1)
    of_lane = tl.sum(number, 1)
    place = tl.atomic_add(copied + tl.zeros(of_lane.shape, tl.int32), of_lane, mask=of_lane > 0, sem="relaxed")
    place = place[:, None] + up_to - 1
    tl.store(values + place, z.to(values.dtype.element_ty), mask=inside & (place < capacity))


@triton.jit
def _weigh_tile(
    z, low, high, k_low, k_high, top, inv_t, unit, n_high, n_low, m_k, m_high, m_low,
    copied, values, k_copied, k_values, capacity, TOP_K: tl.constexpr,
):  # fmt: skip
    mass = _mass(z, top, inv_t, unit)
    from_high, from_low, from_k = z >= high, z >= low, z >= k_high
    m_k += tl.sum(tl.where(from_k, mass, 0), 1)
    m_high += tl.sum(tl.where(from_high, mass, 0), 1)
    m_low += tl.sum(tl.where(from_low, mass, 0), 1)
    _copy_tile(z, from_low & (z < high), copied, values, capacity)
    if TOP_K:
        n_high += tl.sum(from_k.to(tl.int32), 1)
        n_low += tl.sum((z >= k_low).to(tl.int32), 1)
        _copy_tile(z, (z >= k_low) & (z < k_high), k_copied, k_values, capacity)
    return n_high, n_low, m_k, m_high, m_low


@triton.jit(do_not_specialize=["tokens"])
def weigh_kernel(
    logits, low, high, top, inv_t, unit, parts, values, copied,
    width, tokens, row_stride, column_stride, capacity, columns_per_program,
    TOP_K: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr, ALIGNED_ROWS: tl.constexpr, ALIGNED_ENDS: tl.constexpr,
):  # fmt: skip
    """Sum a row's part, [splits, tokens, 5]; copy its logits in brackets, [1 + TOP_K, tokens, capacity]."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCK: tl.constexpr = LANES * PER_LANE
    first, full_end, last = _part(split, columns_per_program, width, BLOCK, PER_LANE, ALIGNED_ENDS)
    z_row = logits + _in_lanes(row * row_stride, PER_LANE, ALIGNED_ROWS)
    columns = _columns(LANES, PER_LANE, ALIGNED_ROWS)
    base, step, most = tl.load(top + row), tl.load(inv_t + row), tl.load(unit)
    low += row * (1 + TOP_K)
    high += row * (1 + TOP_K)
    p_low, p_high = tl.load(low + TOP_K), tl.load(high + TOP_K)
    k_low, k_high = tl.full([], float("-inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    if TOP_K:
        k_low, k_high = tl.load(low), tl.load(high)
    k_copied, k_values = copied + row, values + row * capacity
    p_copied, p_values = k_copied, k_values
    if TOP_K:
        p_copied += tokens
        p_values += tokens.to(tl.int64) * capacity

    n_high = tl.zeros([LANES], tl.int32)
    n_low = tl.zeros([LANES], tl.int32)
    m_k = tl.zeros([LANES], tl.int64)
    m_high = tl.zeros([LANES], tl.int64)
    m_low = tl.zeros([LANES], tl.int64)
    for at in range(first, full_end, BLOCK):
        z = tl.load(z_row + (at + columns) * column_stride).to(tl.float32)
        n_high, n_low, m_k, m_high, m_low = _weigh_tile(
            z, p_low, p_high, k_low, k_high, base, step, most, n_high, n_low, m_k, m_high, m_low,
            p_copied, p_values, k_copied, k_values, capacity, TOP_K,
        )  # fmt: skip
    if full_end < last:  # NaN is in no bracket and above none
        inside = columns < last - full_end
        z = tl.load(z_row + (full_end + columns) * column_stride, mask=inside, other=float("nan")).to(tl.float32)
        n_high, n_low, m_k, m_high, m_low = _weigh_tile(
            z, p_low, p_high, k_low, k_high, base, step, most, n_high, n_low, m_k, m_high, m_low,
            p_copied, p_values, k_copied, k_values, capacity, TOP_K,
        )  # fmt: skip
    out = parts + (split.to(tl.int64) * tokens + row) * 5
    tl.store(out, tl.sum(n_high, 0).to(tl.int64))
    tl.store(out + 1, tl.sum(n_low, 0).to(tl.int64))
    tl.store(out + 2, tl.sum(m_k, 0))
    tl.store(out + 3, tl.sum(m_high, 0))
    tl.store(out + 4, tl.sum(m_low, 0))


@triton.jit
def _from(z, mass, pivot):
    return tl.sum(tl.where(z >= pivot, mass, 0), 1)


@triton.jit
def _hold_tile(z, pivots, floor, top, inv_t, unit, held, MASSES: tl.constexpr):
    mass = 1
    if MASSES:
        mass = tl.where(z >= floor, _mass(z, top, inv_t, unit), 0)
    return (
        held[0] + _from(z, mass, pivots[0]), held[1] + _from(z, mass, pivots[1]), held[2] + _from(z, mass, pivots[2]),
        held[3] + _from(z, mass, pivots[3]), held[4] + _from(z, mass, pivots[4]), held[5] + _from(z, mass, pivots[5]),
        held[6] + _from(z, mass, pivots[6]), held[7] + _from(z, mass, pivots[7]),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def held_kernel(
    logits, missed, values, copied, before, pivots, floor, top, inv_t, unit, parts,
    width, tokens, row_stride, column_stride, capacity, columns_per_program,
    MASSES: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
    ALIGNED_ROWS: tl.constexpr, ALIGNED_ENDS: tl.constexpr,
):  # fmt: skip
    """Count logits from each pivot on, or sum their mass: of a row that missed, else of its candidates."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCK: tl.constexpr = LANES * PER_LANE
    columns = _columns(LANES, PER_LANE, ALIGNED_ROWS)
    pivots += row * 8
    pivot = (
        tl.load(pivots), tl.load(pivots + 1), tl.load(pivots + 2), tl.load(pivots + 3),
        tl.load(pivots + 4), tl.load(pivots + 5), tl.load(pivots + 6), tl.load(pivots + 7),
    )  # fmt: skip
    least, base, step, most = 0.0, 0.0, 0.0, 0.0
    if MASSES:
        least, base, step, most = tl.load(floor + row), tl.load(top + row), tl.load(inv_t + row), tl.load(unit)
    none = tl.zeros([LANES], tl.int64 if MASSES else tl.int32)
    held = (none, none, none, none, none, none, none, none)
    out = parts + (split.to(tl.int64) * tokens + row) * 8
    if tl.load(missed + row) != 0:
        z_row = logits + _in_lanes(row * row_stride, PER_LANE, ALIGNED_ROWS)
        first, full_end, last = _part(split, columns_per_program, width, BLOCK, PER_LANE, ALIGNED_ENDS)
        for at in range(first, full_end, BLOCK):
            z = tl.load(z_row + (at + columns) * column_stride).to(tl.float32)
            held = _hold_tile(z, pivot, least, base, step, most, held, MASSES)
        if full_end < last:
            inside = columns < last - full_end
            z = tl.load(z_row + (full_end + columns) * column_stride, mask=inside, other=float("nan"))
            held = _hold_tile(z.to(tl.float32), pivot, least, base, step, most, held, MASSES)
    elif split == 0:
        count = tl.load(copied + row)
        for at in range(0, count, BLOCK):
            column = at + columns
            z = tl.load(values + row * capacity + column, mask=column < count, other=float("nan")).to(tl.float32)
            held = _hold_tile(z, pivot, least, base, step, most, held, MASSES)
    above = tl.load(before + row, mask=split == 0, other=0)
    for number in tl.static_range(8):
        tl.store(out + number, above + tl.sum(held[number], 0).to(tl.int64))


def _tiling(name: str, logits: Tensor) -> Tiling:
    tokens, width = logits.shape
    return tiling(tokens, width, logits.element_size(), processors(logits.device), cut(name, logits.device))


def _sizes(logits: Tensor, tile: Tiling) -> dict[str, int | bool]:
    return {
        "LANES": tile.lanes, "PER_LANE": tile.per_lane, "ALIGNED_ROWS": tile.aligns_rows(logits),
        "ALIGNED_ENDS": tile.aligns(logits.shape[1]), "num_warps": tile.warps,
    }  # fmt: skip


@torch.library.custom_op("parallel_rl::vocab_bins", mutates_args=())
def vocab_bins(logits: Tensor, end: Tensor, rate: Tensor, inv_t: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Count logits [T, W] in bins of a window with upper end and bins per unit [T, 1].

    Returns [T, bins + 2]: the count of each bin, 0 for the last; the total mass relative to the window's end; the last bin's
    mass. And the maximum [T, 1].
    """
    tokens, width = logits.shape
    sums, largest = _binned(logits, end, rate, inv_t, bins)
    if not logits.numel():
        return sums.zero_(), largest.fill_(-torch.inf)
    tile = _tiling("bins", logits)
    parts = torch.empty(tile.splits, tokens, bins + 3, dtype=torch.float32, device=logits.device)
    with on_device(logits.device):
        bins_kernel[tokens, tile.splits](
            logits, end, rate, inv_t, parts, width, tokens, *logits.stride(), tile.columns, BINS=bins, **_sizes(logits, tile)
        )  # fmt: skip
    torch.sum(parts[..., :-1], 0, out=sums)
    torch.amax(parts[..., -1:], 0, out=largest)
    return sums, largest


@vocab_bins.register_fake
def _binned(logits: Tensor, end: Tensor, rate: Tensor, inv_t: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    return end.new_empty(len(logits), bins + 2), end.new_empty(len(logits), 1)


@torch.library.custom_op("parallel_rl::vocab_weigh", mutates_args=())
def vocab_weigh(
    logits: Tensor, low: Tensor, high: Tensor, top: Tensor, inv_t: Tensor, unit: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh logits above the brackets [T, B] of top-k (if B = 2) and top-p, and copy those inside.

    Returns:
        [T, 5]: counts above top-k's bracket, and from its lower end on; the mass above it (without top-k the total), above
            top-p's, and from that one's lower end on. [B, T, capacity] the logits inside, in any order. [B, T] their number,
            also beyond the capacity.
    """
    sums, values, number = _weighed(logits, low, high, top, inv_t, unit, capacity)
    sums.zero_(), number.zero_()
    if not logits.numel():
        return sums, values, number
    tokens, width = logits.shape
    tile = _tiling("weigh", logits)
    parts = sums.new_empty(tile.splits, *sums.shape)
    with on_device(logits.device):
        weigh_kernel[tokens, tile.splits](
            logits, low, high, top, inv_t, unit, parts, values, number,
            width, tokens, *logits.stride(), capacity, tile.columns, TOP_K=low.shape[1] > 1, **_sizes(logits, tile),
        )  # fmt: skip
    return parts.sum(0), values, number


@vocab_weigh.register_fake
def _weighed(
    logits: Tensor, low: Tensor, high: Tensor, top: Tensor, inv_t: Tensor, unit: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, brackets = low.shape
    sums = low.new_empty(tokens, 5, dtype=torch.int64)
    return sums, logits.new_empty(brackets, tokens, capacity), low.new_empty(brackets, tokens, dtype=torch.int32)


@torch.library.custom_op("parallel_rl::vocab_held", mutates_args=())
def vocab_held(
    logits: Tensor, missed: Tensor, values: Tensor, copied: Tensor, before: Tensor, scale: Sequence[Tensor], pivots: Tensor
) -> Tensor:  # fmt: skip
    """Count each row's logits from its pivots [T, 8] on, or with a scale sum their mass; [T, 8] int64.

    Args:
        missed: [T, 1] bool rows whose logits are read.
        values, copied, before: for the other rows, [T, C] candidates, [T] their number, [T, 1] the count or mass above them.
        scale: [T, 1] smallest logit that counts, maximum and 1/temperature, and [1, 1] the largest mass; or empty.
    """
    tokens, width = logits.shape
    tile = _tiling("held", logits)
    parts = torch.empty(tile.splits, tokens, 8, dtype=torch.int64, device=logits.device)
    with on_device(logits.device):
        held_kernel[tokens, tile.splits](
            logits, missed.contiguous(), values, copied, before.contiguous(), pivots, *(scale or (None,) * 4), parts,
            width, tokens, *logits.stride(), values.shape[1], tile.columns, MASSES=len(scale) > 0, **_sizes(logits, tile),
        )  # fmt: skip
    return parts.sum(0)


@vocab_held.register_fake
def _(
    logits: Tensor, missed: Tensor, values: Tensor, copied: Tensor, before: Tensor, scale: Sequence[Tensor], pivots: Tensor
) -> Tensor:  # fmt: skip
    return torch.empty_like(pivots, dtype=torch.int64, memory_format=torch.contiguous_format)
