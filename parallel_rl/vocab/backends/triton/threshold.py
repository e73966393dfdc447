"""The kernels that find a row's threshold as torch operators, like those of `operators`."""

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


def _of_rows(logits: Tensor, tile: Tiling) -> dict[str, int | bool]:
    """Constants of a pass over these logits."""
    return {
        "LANES": tile.lanes, "PER_LANE": tile.per_lane, "ALIGNED_ROWS": tile.aligns_rows(logits),
        "ALIGNED_ENDS": tile.aligns(logits.shape[1]), "num_warps": tile.warps,
    }  # fmt: skip


@torch.library.custom_op("parallel_rl::vocab_bins", mutates_args=())
def vocab_bins(logits: Tensor, end: Tensor, rate: Tensor, inv_t: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """[T, W] logits, [T, 1] upper end and bins per unit of the window, 1/temperature → [T, bins + 2] and the largest [T, 1].

    How many logits each bin but the last has, 0 for that, the mass of all, relative to the window's end, and that of the last.
    """
    tokens, width = logits.shape
    sums, largest = _binned(logits, end, rate, inv_t, bins)
    if not logits.numel():
        return sums.zero_(), largest.fill_(-torch.inf)
    tile = _tiling("bins", logits)
    parts = torch.empty(tile.splits, tokens, bins + 3, dtype=torch.float32, device=logits.device)
    with on_device(logits.device):
        bins_kernel[tokens, tile.splits](
            logits, end, rate, inv_t, parts, width, tokens, *logits.stride(), tile.columns, BINS=bins, **_of_rows(logits, tile)
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
    """Weigh the logits above brackets [T, B] of top-k, if it asks (B = 2), and of top-p, and copy those inside.

    Returns:
        [T, 5] how many are above that of top-k, and from its lower end on; the mass above it, or without top-k that of all;
        the mass above that of top-p, and from its lower end on. Then [B, T, capacity] the logits inside each, in any order, and
        [B, T] how many there are: more than the capacity are not all there.
    """
    sums, values, found = _weighed(logits, low, high, top, inv_t, unit, capacity)
    sums.zero_(), found.zero_()
    if not logits.numel():
        return sums, values, found
    tokens, width = logits.shape
    tile = _tiling("weigh", logits)
    parts = sums.new_empty(tile.splits, *sums.shape)
    with on_device(logits.device):
        weigh_kernel[tokens, tile.splits](
            logits, low, high, top, inv_t, unit, parts, values, found,
            width, tokens, *logits.stride(), capacity, tile.columns, TOP_K=low.shape[1] > 1, **_of_rows(logits, tile),
        )  # fmt: skip
    return parts.sum(0), values, found


@vocab_weigh.register_fake
def _weighed(
    logits: Tensor, low: Tensor, high: Tensor, top: Tensor, inv_t: Tensor, unit: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, brackets = low.shape
    sums = low.new_empty(tokens, 5, dtype=torch.int64)
    return sums, logits.new_empty(brackets, tokens, capacity), low.new_empty(brackets, tokens, dtype=torch.int32)


@torch.library.custom_op("parallel_rl::vocab_held", mutates_args=())
def vocab_held(
    logits: Tensor,
    missed: Tensor,
    values: Tensor,
    found: Tensor,
    before: Tensor,
    scale: Sequence[Tensor],
    pivots: Tensor,
) -> Tensor:
    """How many logits each row holds from each of its pivots [T, 8] on, or with a scale their mass, [T, 8] int64.

    Args:
        missed: [T, 1] bool rows whose logits are read; the others are not.
        values, found, before: of the other rows, [T, C] candidates, [T] their number, [T, 1] what lies above them.
        scale: [T, 1] least logit that counts, largest one and 1/temperature, and [1, 1] the largest mass; or nothing.
    """
    tokens, width = logits.shape
    tile = _tiling("held", logits)
    parts = torch.empty(tile.splits, tokens, 8, dtype=torch.int64, device=logits.device)
    with on_device(logits.device):
        held_kernel[tokens, tile.splits](
            logits, missed.contiguous(), values, found, before.contiguous(), pivots, *(scale or (None,) * 4), parts,
            width, tokens, *logits.stride(), values.shape[1], tile.columns, MASSES=len(scale) > 0, **_of_rows(logits, tile),
        )  # fmt: skip
    return parts.sum(0)


@vocab_held.register_fake
def _(
    logits: Tensor, missed: Tensor, values: Tensor, found: Tensor, before: Tensor, scale: Sequence[Tensor], pivots: Tensor
) -> Tensor:  # fmt: skip
    return torch.empty_like(pivots, dtype=torch.int64, memory_format=torch.contiguous_format)
