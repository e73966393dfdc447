"""The kernels as torch operators, `torch.ops.parallel_rl.*`: traced by torch.compile, captured by CUDA graphs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_rl.vocab.backends.choice import PER_TOP, cut, tiling
from parallel_rl.vocab.backends.triton.kernels import combine_kernel, gradient_kernel, merge_kernel, stats_kernel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_TOKENS = 128  # rows of a combining program


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 0 under the interpreter, which runs programs in turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def on_device(device: torch.device) -> AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()  # Triton launches on the current one


def _row_step(inv_t: Tensor) -> int:
    return 0 if inv_t.shape[0] == 1 else inv_t.stride(0)


def _stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


def _parts(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, start: int, valid: int, entropy: bool, squares: bool,
    half: Tensor | None = None, tops: Tensor | None = None,
) -> Tensor:  # fmt: skip
    tokens, device = logits.shape[0], logits.device
    tile = tiling(tokens, valid, logits.element_size(), processors(device), cut("stats", device))
    parts = torch.empty(tile.splits, tokens, 3 + entropy + squares, dtype=torch.float32, device=device)
    if tokens:
        with on_device(device):
            stats_kernel[tokens, tile.splits](
                logits, targets.contiguous(), keep.contiguous(), inv_t, parts, half, tops,
                start, valid, tokens, *logits.stride(), _stride(half), _stride(tops), _row_step(inv_t), tile.columns,
                ENTROPY=entropy, SQUARES=squares, PER_TOP=0 if half is None else PER_TOP,
                LANES=tile.lanes, PER_LANE=tile.per_lane,
                ALIGNED_ROWS=tile.aligns_rows(logits, half), ALIGNED_ENDS=tile.aligns(valid),
                num_warps=tile.warps, enable_fp_fusion=True,
            )  # fmt: skip
    return parts


@torch.library.custom_op("parallel_rl::vocab_stats", mutates_args=())
def vocab_stats(
    logits: Tensor,
    targets: Tensor,
    keep: Tensor,
    inv_t: Tensor,
    start: int,
    valid: int,
    entropy: bool,
    squares: bool = False,
) -> Tensor:
    """Compute [T, 3 + entropy + squares] parts from [T, W] logits, [T] global targets and kept rows."""
    return _merge(_parts(logits, targets, keep, inv_t, start, valid, entropy, squares), inv_t)


def _merge(parts: Tensor, inv_t: Tensor) -> Tensor:
    splits, tokens, width = parts.shape
    entropy, squares = width > 3, width > 4
    if splits == 1 or tokens == 0:
        return parts[0]
    merged = torch.empty(tokens, width, dtype=torch.float32, device=parts.device)
    with on_device(parts.device):
        merge_kernel[(-(-tokens // _TOKENS),)](
            parts, inv_t, merged, tokens, splits, _row_step(inv_t),
            ENTROPY=entropy, SQUARES=squares, BLOCK=_TOKENS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return merged


@torch.library.custom_op("parallel_rl::vocab_stats_half", mutates_args=("half", "tops"))
def vocab_stats_half(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, start: int, valid: int, entropy: bool, squares: bool,
    half: Tensor, tops: Tensor,
) -> Tensor:  # fmt: skip
    """Compute `vocab_stats` of float32 logits and store them as `half` [T, W] distances from `tops`."""
    return _merge(_parts(logits, targets, keep, inv_t, start, valid, entropy, squares, half, tops), inv_t)


@vocab_stats.register_fake
@vocab_stats_half.register_fake
def _(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, start: int, valid: int, entropy: bool,
    squares: bool = False, *_: Tensor,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape[0], 3 + entropy + squares, dtype=torch.float32)


def _combine(parts: Tensor, keep: Tensor, inv_t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    count, tokens, width = parts.shape
    sums = _combined(parts)
    if tokens:
        with on_device(parts.device):
            combine_kernel[(-(-tokens // _TOKENS),)](
                parts.contiguous(), keep.contiguous(), inv_t, *sums, tokens, count, _row_step(inv_t),
                ENTROPY=width > 3, SQUARES=width > 4, BLOCK=_TOKENS, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
    return sums


@torch.library.custom_op("parallel_rl::vocab_combine", mutates_args=())
def vocab_combine(parts: Tensor, keep: Tensor, inv_t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Combine parts [ranks, T, 3 to 5] to log-prob, entropy, lse, rows (M, log A, H), Σπ²; unused are [0]."""
    return _combine(parts, keep, inv_t)


@vocab_combine.register_fake
def _combined(parts: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, width = parts.shape[1:]
    logprobs, lse = parts.new_empty(tokens), parts.new_empty(tokens)
    entropy, sums = (parts.new_empty(tokens if width > at else 0) for at in (3, 4))
    return logprobs, entropy, lse, parts.new_empty(tokens, 3 if width > 3 else 2), sums


@torch.library.custom_op("parallel_rl::vocab_row_stats", mutates_args=())
def vocab_row_stats(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, start: int, valid: int, entropy: bool, squares: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `vocab_combine` of `vocab_stats` of a whole vocabulary; a row's splits combine like shards."""
    return _combine(_parts(logits, targets, keep, inv_t, start, valid, entropy, squares), keep, inv_t)


@torch.library.custom_op("parallel_rl::vocab_row_stats_half", mutates_args=("half", "tops"))
def vocab_row_stats_half(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, start: int, valid: int, entropy: bool, squares: bool,
    half: Tensor, tops: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _combine(_parts(logits, targets, keep, inv_t, start, valid, entropy, squares, half, tops), keep, inv_t)


@vocab_row_stats.register_fake
@vocab_row_stats_half.register_fake
def _(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, start: int, valid: int, entropy: bool, squares: bool,
    *_: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _combined(logits.new_empty(1, logits.shape[0], 3 + entropy + squares, dtype=torch.float32))


@torch.library.custom_op("parallel_rl::vocab_gradient", mutates_args=())
def vocab_gradient(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, rows: Tensor,
    g_logprobs: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, start: int, valid: int,
) -> Tensor:  # fmt: skip
    """Compute the logits' gradient in a new tensor, from `rows` of `vocab_combine` and upstream ones [T]."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _launch_gradient(logits, targets, keep, inv_t, rows, g_logprobs, g_entropy, g_lse, start, valid, out)
    return out


@vocab_gradient.register_fake
def _(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, rows: Tensor,
    g_logprobs: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, start: int, valid: int,
) -> Tensor:  # fmt: skip
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("parallel_rl::vocab_gradient_", mutates_args=("logits",))
def vocab_gradient_(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, rows: Tensor,
    g_logprobs: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, start: int, valid: int,
) -> None:  # fmt: skip
    _launch_gradient(logits, targets, keep, inv_t, rows, g_logprobs, g_entropy, g_lse, start, valid, logits)


@torch.library.custom_op("parallel_rl::vocab_gradient_to", mutates_args=("out",))
def vocab_gradient_to(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, rows: Tensor,
    g_logprobs: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, start: int, valid: int, out: Tensor,
    tops: Tensor | None = None,
) -> None:  # fmt: skip
    """Write `vocab_gradient` to `out` [T, W] in its dtype; it may overlay logits with elements as wide.

    With `tops`, of `vocab_stats_half`, the logits are distances from them.
    """
    _launch_gradient(logits, targets, keep, inv_t, rows, g_logprobs, g_entropy, g_lse, start, valid, out, tops)


def _launch_gradient(
    logits: Tensor, targets: Tensor, keep: Tensor, inv_t: Tensor, rows: Tensor,
    g_logprobs: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, start: int, valid: int, out: Tensor,
    tops: Tensor | None = None,
) -> None:  # fmt: skip
    tokens, width = logits.shape
    if tokens == 0 or width == 0:
        return
    targets, keep = targets.contiguous(), keep.contiguous()
    device = logits.device
    tile = tiling(tokens, width, logits.element_size(), processors(device), cut("gradient", device))
    # `sum` gives expanded gradients
    upstream = [None if g is None else g.contiguous() for g in (g_logprobs, g_entropy, g_lse)]
    with on_device(logits.device):
        gradient_kernel[tokens, tile.splits](
            logits, tops, targets, keep, inv_t, rows, *upstream, out,
            start, valid, width, *logits.stride(), _stride(tops), *out.stride(), _row_step(inv_t), tile.columns,
            SAVED=rows.shape[1], LOGPROB=g_logprobs is not None, ENTROPY=g_entropy is not None, LSE=g_lse is not None,
            PER_TOP=0 if tops is None else PER_TOP, LANES=tile.lanes, PER_LANE=tile.per_lane,
            ALIGNED_ROWS=tile.aligns_rows(logits, out), ALIGNED_ENDS=tile.aligns(valid, width),
            num_warps=tile.warps, enable_fp_fusion=True,
        )  # fmt: skip


# mypy: disable-error-code="no-untyped-def"
_BLOCK, _WARPS = 1024, 4
_PROGRAMS = 16  # per multiprocessor


@triton.jit(do_not_specialize=["rows"])
def scale_kernel(values, factor, rows, width, BLOCK: tl.constexpr):
    """Scale values [rows, width] by factor; 1, as at the root of most graphs, reads and writes nothing."""
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        of_row = values + tl.program_id(0).to(tl.int64) * width
        for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
            for at in range(0, width, BLOCK):
                column = at + tl.arange(0, BLOCK)
                x = tl.load(of_row + column, mask=column < width).to(tl.float32)
                tl.store(of_row + column, (x * scale).to(values.dtype.element_ty), mask=column < width)
            of_row += tl.num_programs(0) * width


@torch.library.custom_op("parallel_rl::scale_", mutates_args=("values",))
def scale_(values: Tensor, factor: Tensor) -> None:
    """Scale contiguous [R, D] values of any floating dtype by a 0-dim factor, in float32."""
    if not values.numel():
        return
    rows, width = values.shape
    programs = min(rows, max(1, _PROGRAMS * processors(values.device)))
    with on_device(values.device):
        scale_kernel[(programs,)](values, factor, rows, width, BLOCK=_BLOCK, num_warps=_WARPS)
