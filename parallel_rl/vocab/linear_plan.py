"""Which rows of the hidden states are projected together, and which chunks' logits are kept, for a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from parallel_rl.groups import group_rank, group_size
from parallel_rl.vocab.backends.torch_backend import math_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

LinearMode = Literal["auto", "in_forward", "resident", "recompute"]
MODES: tuple[str, ...] = get_args(LinearMode)

_DEFAULT_BUDGET = {"cpu": 1 << 26, "cuda": 1 << 29}
_MOST_ROWS = 4096  # beyond it a product gains nothing from more rows
_ALIGN = 64


@dataclass(frozen=True)
class Plan:
    """Chunks of `size` rows of every part; the first `resident` of them keep their logits until the backward."""

    size: int
    resident: int


def check_mode(mode: LinearMode, budget: int | None, rows: int | None) -> None:
    """Raises ValueError for an unknown mode, and for numbers that no mode can keep to."""
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r} is not valid; choose one of {', '.join(MODES)}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise ValueError(f"budget = {budget!r} must be a positive number of bytes, or None")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 0):
        raise ValueError(f"rows = {rows!r} must be a number of rows ≥ 0, or None")


def make_plan(
    hidden: Tensor, width: int, group: ProcessGroup | None, parts: int, mode: LinearMode, budget: int | None
) -> Plan:
    """The chunks for [R, D] hidden rows a part and `width` columns a rank, alike on all ranks that share a batch.

    Raises:
        ValueError: a budget that is too small for one row of each part.
    """
    total = hidden.shape[0]
    bytes_of_row, kept = parts * row_bytes(hidden, width, group), parts * width * kept_dtype(hidden.dtype).itemsize
    room = _DEFAULT_BUDGET.get(hidden.device.type, _DEFAULT_BUDGET["cuda"]) if budget is None else budget
    if room < bytes_of_row:
        if budget is not None:
            raise ValueError(
                f"budget = {budget} bytes is too small for one row of logits with what its gradient needs, "
                f"{bytes_of_row} bytes at {width} columns and {hidden.shape[1]} hidden"
            )
        room = bytes_of_row  # a default never refuses
    shared = mode == "auto" and total * kept + bytes_of_row > room  # chunk and kept logits share the budget
    most = max(1, min(total, _MOST_ROWS, (room // 2 if shared else room) // bytes_of_row))
    if mode == "auto" and not shared:
        most = max(1, min(most, (room - total * kept) // bytes_of_row))
    size = most - most % _ALIGN if _ALIGN < most < total else most
    chunks = -(-total // size)
    if mode == "resident":
        return Plan(size, chunks)
    if mode == "auto":
        return Plan(size, min(chunks, max(0, room - size * bytes_of_row) // max(size * kept, 1)))
    return Plan(size, 0)


def row_bytes(hidden: Tensor, width: int, group: ProcessGroup | None) -> int:
    """Bytes that one projected row takes while its chunk is worked on, beyond the gradients."""
    dtype = math_dtype(hidden.dtype)
    low = hidden.dtype.itemsize if hidden.is_cuda and dtype != hidden.dtype else 0  # operands of the products
    buffers = 2 if group_size(group) > 1 else 1  # the next chunk is projected while this one's numbers travel
    return buffers * (width * dtype.itemsize + 2 * hidden.shape[1] * dtype.itemsize) + width * low


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """What logits are kept in: z − max z in float16 for low-precision operands, which p forgives; else as they are."""
    return torch.float16 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(frozen=True)
class Rows:
    """The rows to project: `order[part, i]` is the i-th of each part, those that carry loss first.

    The order of all rows is that of the gathered hidden states: part 0's rows, then part 1's. Only as many of the order
    are kept as carry loss on any part: told by the host where the mask lies in its memory, else by the caller's bound.
    """

    order: Tensor  # [parts, n]
    of_part: int  # R
    rank: int  # this rank's part
    chunk: int
    excess: Tensor | None  # 0-dim bool: more rows carry loss than the bound said

    @classmethod
    def of(cls, keep: Tensor, parts: int, chunk: int, bound: int | None, group: ProcessGroup | None) -> Rows:
        mask = keep.view(parts, -1)
        total, excess = mask.shape[1], None
        needed = total if bound is None else min(bound, total)
        if keep.device.type == "cpu":  # free: the host reads its own memory
            needed = min(needed, int(mask.numpy().sum(1).max(initial=0)))
        if bound is not None:
            excess = mask.sum(1).amax() > bound if total else None
        if needed == total:
            order = torch.arange(total, device=keep.device).expand(parts, total)
        else:
            order = torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True)[:, :needed]
        return cls(order, total, group_rank(group) if parts > 1 else 0, chunk, excess)

    def __len__(self) -> int:
        """The number of chunks."""
        return -(-self.order.shape[1] // self.chunk)

    def own(self, index: int) -> Tensor:
        """A chunk's rows among this rank's hidden states."""
        return self.order[self.rank, index * self.chunk : (index + 1) * self.chunk]

    def every(self, index: int) -> Tensor:
        """A chunk's rows of all parts, in the gathered order."""
        part = self.order[:, index * self.chunk : (index + 1) * self.chunk]
        offsets = torch.arange(part.shape[0], device=part.device)[:, None] * self.of_part
        return (part + offsets).reshape(-1)
