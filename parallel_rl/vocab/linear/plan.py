"""Plan of the LM head: the rows projected together and the logits kept, for a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch

from parallel_rl.groups import group_size
from parallel_rl.vocab.backends.choice import tops_of
from parallel_rl.vocab.backends.torch_backend import math_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LinearMode = Literal["auto", "in_forward", "resident", "recompute"]
MODES: tuple[str, ...] = get_args(LinearMode)

_HOST_BUDGET = 1 << 26
_MOST_OF_CARD, _OF_CARD = 1 << 31, 0.015
_MOST_ROWS = 4096  # more rows do not speed up a product
_LEAST_COLUMNS = 2048  # fewer columns slow a product down
_ALIGN, _ALIGN_COLUMNS = 16, 64
# GEMM tile and SM count of an H100 or H200; a wave is one tile per SM
_TILE, _WAVE = (128, 256), 132
_GROUP = 1024  # rows of kept chunks; with fewer the weight's gradient waits for the sum it is added to
_WAVE_COLUMNS = 33 * _TILE[1]  # with row tiles in multiples of 4, whole waves
_LEAST_ROWS = 256  # with fewer a product waits to read the weight
_OF_GROUP = 3  # a chunk may take a third of its group's budget


@dataclass(frozen=True)
class Plan:
    """Chunks and tiles of every part's rows.

    Forward projects `size` rows at a time, as a row's statistics need all its logits. Each gradient pass writes the whole
    weight gradient, so chunks are kept in half the bytes until they form a group. With known statistics any columns suffice, so
    backward projects tiles of many rows.
    """

    size: int  # rows of a chunk with whole logits
    resident: bool  # all logits are kept until the backward
    group: int  # rows whose logits are kept until they are multiplied together, one chunk or several
    tile: tuple[int, int]  # (rows, columns) re-projected together; for truncated rows a chunk as in forward


def check_mode(mode: LinearMode, budget: int | None, rows: int | None) -> None:
    """Raise ValueError for an unknown mode, a budget that is no positive integer, or negative rows."""
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r} is not valid; choose one of {', '.join(MODES)}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise ValueError(f"budget = {budget!r} must be a positive number of bytes, or None")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 0):
        raise ValueError(f"rows = {rows!r} must be a number of rows ≥ 0, or None")


def columns_of_rank(width: int, vocab_size: int | None, group: ProcessGroup | None) -> int:
    """Return the columns that plans use: V/tp ≥ 1, not the rank's own `width`, which may differ."""
    return max(width if vocab_size is None else -(-vocab_size // group_size(group)), 1)


def budget_bytes(budget: int | None, device: torch.device) -> int:
    """Return the given budget, or the device's default: 64 MiB on a host, `card_budget` on a card."""
    if budget is not None:
        return budget
    if device.type == "cpu":
        return _HOST_BUDGET
    if device.type != "cuda":
        return _MOST_OF_CARD
    return card_budget(torch.cuda.get_device_properties(device).total_memory)


def card_budget(memory: int) -> int:
    """Return the largest power of two in 1.5 % of a card's memory, at most 2 GiB (H200; H100: 1 GiB).

    A power, since cards of one kind differ a little in size and all ranks need the same plan.
    >>> card_budget(80 * 2**30) == 2**30
    True
    """
    return min(_MOST_OF_CARD, 1 << (int(_OF_CARD * memory).bit_length() - 1))


@dataclass(frozen=True)
class HeadShape:
    """Sizes for a plan, equal on all ranks that share a batch."""

    rows: int  # R of each part
    size: int  # D of the hidden states
    width: int  # columns a rank, of `columns_of_rank`
    dtype: torch.dtype  # of the operands
    device: torch.device
    shared: bool = False  # other ranks work on the same rows
    parts: int = 1  # ranks that the rows are split over
    in_place: bool = False  # kept logits are overwritten by their gradient, see `LinearParams.grad_in_operand_dtype`
    whole_rows: bool = False  # re-projected logits must have the bits of the forward
    spared: int = 0  # bytes of the weight gradient's float32 sum beyond the gradient: unused with one group of all rows

    @property
    def on_card(self) -> bool:
        return self.device.type != "cpu"

    @property
    def half(self) -> bool:
        return self.in_place and kept_dtype(self.dtype) != math_dtype(self.dtype)


def rows_at_once(total: int, cost: int, room: int) -> int:
    """Return the rows of a chunk at `cost` bytes each; equal chunks, of 1024 rows if they fit."""
    most = max(1, min(total, _MOST_ROWS, room // cost))
    unit = _GROUP if most >= _GROUP else _ALIGN
    if most <= unit or most == total:
        return most
    alike = -(-total // -(-total // most))
    return min(-(-alike // unit) * unit, most - most % unit)


def _rows_projected(shape: HeadShape, cost: int, room: int) -> int:
    """Return `rows_at_once` of chunks projected alone; on a card the size with the fewest waves of logits."""
    most = max(1, min(shape.rows, _MOST_ROWS, room // cost))
    if not shape.on_card or most < _TILE[0] or most == shape.rows:
        return rows_at_once(shape.rows, cost, room)
    return _fewest_waves(shape.rows, range(most - most % _ALIGN, most // 2, -_ALIGN), shape.parts, shape.width)


@lru_cache(maxsize=256)
def _fewest_waves(total: int, sizes: range, parts: int, columns: int) -> int:
    """Return the first size for which the products [rows, columns] of all rows are the fewest waves."""

    def waves(rows: int) -> int:
        return _waves(max(parts * rows, _LEAST_ROWS), columns)

    def waves_of_all(size: int) -> int:
        return total // size * waves(size) + (waves(total % size) if total % size else 0)

    return min(sizes, key=waves_of_all)


def _waves(rows: int, columns: int) -> int:
    tiles = min(-(-rows // a) * -(-columns // b) for a, b in (_TILE, _TILE[::-1]))
    return -(-tiles // _WAVE)


def make_plan(shape: HeadShape, mode: LinearMode, budget: int | None) -> Plan:
    """Make the plan of a call; ValueError for a budget too small for one row of each part."""
    total, width, parts = shape.rows, shape.width, shape.parts
    cost = _Cost.of(shape)
    kept = cost.half if shape.half else parts * width * kept_dtype(shape.dtype).itemsize
    room = budget_bytes(budget, shape.device)
    if room < cost.whole:
        if budget is not None:
            raise ValueError(
                f"budget = {budget} bytes is too small for one row of logits with what its gradient needs, "
                f"{cost.whole} bytes at {width} columns and {shape.size} hidden"
            )
        room = cost.whole  # a default never refuses
    tile = _tile(shape, cost, room)
    if mode == "in_forward":
        size, group = _group(shape, cost, room) if shape.half else (rows_at_once(total, cost.whole, room),) * 2
        return Plan(size, False, group, tile)
    resident = mode == "resident" or (mode == "auto" and total * kept + cost.whole <= room)
    rest = room - total * kept if resident and mode == "auto" else room
    size = _rows_projected(shape, cost.whole, rest)
    together = shape.in_place and parts == 1  # rows of several parts lie chunk by chunk
    group = size * max(1, rest // (size * max(cost.ends, 1))) if together else size
    return Plan(size, resident, group, (size, width) if shape.whole_rows else tile)


class _Cost(NamedTuple):
    """Bytes of one row of each part, beyond the gradients."""

    whole: int  # its logits with their gradient's needs
    ends: int  # its hidden states and their gradient
    logit: int  # one column of its logits
    chunk: int  # its logits, projected before they are kept
    half: int  # its logits, kept in half the bytes

    @classmethod
    def of(cls, shape: HeadShape) -> _Cost:
        dtype, parts = math_dtype(shape.dtype), shape.parts
        low = shape.dtype.itemsize if shape.on_card and dtype != shape.dtype else 0  # for the products
        buffers = 2 if shape.shared else 1  # the next rows are projected while these rows' statistics are exchanged
        ends = parts * buffers * 2 * shape.size * dtype.itemsize
        logit, row = dtype.itemsize + low, parts * shape.width
        half = parts * half_bytes(shape.width)
        return cls(ends + row * buffers * logit, ends, parts * logit, row * dtype.itemsize, half)


def _group(shape: HeadShape, cost: _Cost, room: int) -> tuple[int, int]:
    """Return the rows of a chunk and of a group of kept chunks; equal if one chunk fits as many."""
    total, single, row = shape.rows, rows_at_once(shape.rows, cost.whole, room), cost.half + cost.ends
    size = _power_of_rows(room // _OF_GROUP // cost.chunk)
    spare = room + shape.spared - total * row
    if single < total and spare >= cost.chunk * max(1, min(size, _LEAST_ROWS)):
        spare = min(spare, cost.chunk * (total - 1))  # at least two chunks, or nothing would be kept
        at_once = _rows_projected(shape, cost.chunk, spare)
        return at_once, -(-total // at_once) * at_once
    most = min(_MOST_ROWS, (room - size * cost.chunk) // row)
    size = _power_of_rows(min(size, most))
    if not size or single >= min(most, total):
        return single, single
    least = max(most // 2, min(most - size, _GROUP - 1))
    # the hidden states' gradient is a product with the weight
    group = _fewest_waves(total, range(most - most % size, least, -size), shape.parts, shape.size)
    return (size, group) if group > max(size, single) else (single, single)


def _power_of_rows(most: int) -> int:
    """Return the largest power of two ≤ `most`, up to a group's rows; 0 if `most` < 1."""
    return (1 << min(_GROUP, max(0, most)).bit_length()) >> 1


def _tile(shape: HeadShape, cost: _Cost, room: int) -> tuple[int, int]:
    rows, width = max(shape.rows, 1), shape.width
    least = min(width, _LEAST_COLUMNS)
    most = max(1, min(rows, room // (cost.ends + cost.logit * least)))
    if shape.shared:
        most = max(1, min(most, _MOST_ROWS // shape.parts))  # collectives of other rows overlap with the products
    most = -(-rows // -(-rows // most))  # equal sizes
    columns = max(1, min(width, (room // most - cost.ends) // cost.logit))
    if _ALIGN_COLUMNS <= columns < width:
        columns -= columns % _ALIGN_COLUMNS
    even = -(-width // -(-width // columns))
    if shape.on_card and (waves := -(-even // _WAVE_COLUMNS) * _WAVE_COLUMNS) <= columns:
        return most, waves
    return most, min(columns, -(-even // _ALIGN_COLUMNS) * _ALIGN_COLUMNS)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of kept logits: float16, as z − max z, for low-precision operands; else theirs."""
    return torch.float16 if dtype in (torch.bfloat16, torch.float16) else dtype


def half_bytes(columns: int) -> int:
    return columns * torch.float16.itemsize + tops_of(columns) * torch.float32.itemsize
