# mypy: disable-error-code="no-untyped-def"
"""Scale a gradient in place by a factor that only the device knows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_rl.vocab.backends.triton.operators import on_device, processors

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
