"""Kernels that find a row's threshold as torch operators, like those of `operators`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_rl.vocab.backends.triton.cuts import Tiling, cut, tiling
from parallel_rl.vocab.backends.triton.operators import on_device, processors
from parallel_rl.vocab.backends.triton.threshold_kernels import bins_kernel, held_kernel, weigh_kernel


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
