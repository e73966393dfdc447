"""Plan of the LM head: the rows that are projected together and the logits that are kept, for a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch

from parallel_rl.groups import group_rank, group_size
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.backends.triton.cuts import tops_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

LinearMode = Literal["auto", "in_forward", "resident", "recompute"]
MODES: tuple[str, ...] = get_args(LinearMode)

_HOST_BUDGET = 1 << 26
_MOST_OF_CARD, _OF_CARD = 1 << 31, 0.015
_MOST_ROWS = 4096  # beyond it a product gains nothing from more rows
_LEAST_COLUMNS = 2048  # below it a product loses
_ALIGN, _WAVE = 64, 1024  # rows; at D 4096 a wave's fill the 132 multiprocessors of an H100 with tiles of a product
_WAVE_COLUMNS = 33 * 256  # 33 tiles across, of 132 multiprocessors; down there are multiples of 4
_LEAST_ROWS = 256  # below it a product waits for the weight that it reads
_OF_GROUP = 3  # a chunk may take a third of the budget of the group that it is kept in


@dataclass(frozen=True)
class Plan:
    """Chunks and tiles that the rows of every part are cut into.

    A row's statistics need all its logits, so that forward projects `size` rows at a time. Each pass that computes gradients
    writes the whole gradient of the weight, so that many rows share one: chunks are kept, in half the bytes, until they are a
    group. Once a row's statistics are known any columns do, so that backward projects tiles of many rows.

    Attributes:
        size: rows of a chunk, whose logits exist whole.
        resident: all logits are kept until the backward.
        group: rows whose logits are kept until they are multiplied together, one chunk or several.
        tile: (rows, columns) that are projected again together; where a row is truncated, a chunk as in forward.
    """

    size: int
    resident: bool
    group: int
    tile: tuple[int, int]


def check_mode(mode: LinearMode, budget: int | None, rows: int | None) -> None:
    """Check the options of `LMHeadInput` that are one value each.

    Raises:
        ValueError: an unknown mode, a budget that is not a positive integer, a negative number of rows.
    """
    if mode not in MODES:
        raise ValueError(f"mode = {mode!r} is not valid; choose one of {', '.join(MODES)}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise ValueError(f"budget = {budget!r} must be a positive number of bytes, or None")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 0):
        raise ValueError(f"rows = {rows!r} must be a number of rows ≥ 0, or None")


def columns_of_rank(width: int, vocab_size: int | None, group: ProcessGroup | None) -> int:
    """Columns that plans count with: V/tp, at least 1; not the rank's own `width`, which may differ between ranks."""
    return max(width if vocab_size is None else -(-vocab_size // group_size(group)), 1)


def budget_bytes(budget: int | None, device: torch.device) -> int:
    """Bytes that a call may take: the given ones, or the device's default, 64 MiB on a host and `card_budget` on a card."""
    if budget is not None:
        return budget
    if device.type == "cpu":
        return _HOST_BUDGET
    if device.type != "cuda":
        return _MOST_OF_CARD
    return card_budget(torch.cuda.get_device_properties(device).total_memory)


def card_budget(memory: int) -> int:
    """The largest power of two in 1.5 % of a card's memory, at most 2 GiB: 2 GiB of an H200's, 1 GiB of an H100's.

    A power, since cards of one kind report sizes that differ a little, and all ranks make the same plan.

    >>> card_budget(80 * 2**30) == 2**30
    True
    """
    return min(_MOST_OF_CARD, 1 << (int(_OF_CARD * memory).bit_length() - 1))


def rows_at_once(total: int, cost: int, room: int) -> int:
    """Rows of a chunk, each of which costs `cost` bytes: at least one, at most `total`; chunks alike, of whole waves where one
    fits."""
    most = max(1, min(total, _MOST_ROWS, room // cost))
    unit = _WAVE if most >= _WAVE else _ALIGN
    if most <= unit or most == total:
        return most
    alike = -(-total // -(-total // most))
    return min(-(-alike // unit) * unit, most - most % unit)


def make_plan(
    hidden: Tensor,
    width: int,
    shared: bool,
    parts: int,
    mode: LinearMode,
    budget: int | None,
    in_place: bool = False,
    whole_rows: bool = False,
    spared: int = 0,
) -> Plan:
    """Make the plan for [R, D] hidden rows a part and `width` columns a rank, alike on all ranks that share a batch.

    Args:
        shared: other ranks work on the same rows.
        in_place: the gradient of kept logits is written over them, see `LinearParams.grad_in_operand_dtype`.
        whole_rows: logits that are projected again must have the bits that they had in forward.
        spared: bytes of a float32 sum of the weight's gradient beyond the gradient, which one group of all rows does without.

    Raises:
        ValueError: a budget that is too small for one row of each part.
    """
    total = hidden.shape[0]
    cost = _Cost.of(hidden, width, shared, parts)
    half = in_place and kept_dtype(hidden.dtype) != math_dtype(hidden.dtype)
    kept = cost.half if half else parts * width * kept_dtype(hidden.dtype).itemsize
    room = budget_bytes(budget, hidden.device)
    if room < cost.whole:
        if budget is not None:
            raise ValueError(
                f"budget = {budget} bytes is too small for one row of logits with what its gradient needs, "
                f"{cost.whole} bytes at {width} columns and {hidden.shape[1]} hidden"
            )
        room = cost.whole  # a default never refuses
    tile = _tile(cost, max(total, 1), width, room, parts)
    if mode == "in_forward":
        size, group = _group(cost, total, room, spared) if half else (rows_at_once(total, cost.whole, room),) * 2
        return Plan(size, False, group, tile)
    resident = mode == "resident" or (mode == "auto" and total * kept + cost.whole <= room)
    rest = room - total * kept if resident and mode == "auto" else room
    size = rows_at_once(total, cost.whole, rest)
    together = in_place and parts == 1  # the rows of several parts lie chunk by chunk
    group = size * max(1, rest // (size * max(cost.ends, 1))) if together else size
    return Plan(size, resident, group, (size, width) if whole_rows else tile)


class _Cost(NamedTuple):
    """Bytes of one row of each part, beyond the gradients."""

    whole: int  # its logits, all of it at once
    ends: int  # its hidden states and their gradient
    logit: int  # one column of its logits
    chunk: int  # its logits, as they are projected before they are kept
    half: int  # its logits, kept in half the bytes
    shared: bool  # other ranks work on the same rows
    on_card: bool

    @classmethod
    def of(cls, hidden: Tensor, width: int, shared: bool, parts: int) -> _Cost:
        dtype = math_dtype(hidden.dtype)
        on_card = hidden.device.type != "cpu"
        low = hidden.dtype.itemsize if on_card and dtype != hidden.dtype else 0  # for the products
        buffers = 2 if shared else 1  # the next rows are projected while these ones' statistics travel
        ends = parts * buffers * 2 * hidden.shape[1] * dtype.itemsize
        logit, row = dtype.itemsize + low, parts * width
        half = parts * half_bytes(width)
        return cls(ends + row * buffers * logit, ends, parts * logit, row * dtype.itemsize, half, shared, on_card)


def _group(cost: _Cost, total: int, room: int, spared: int) -> tuple[int, int]:
    """Rows of a chunk and of a group of kept chunks; the same where a chunk of as many rows fits as it is projected.

    All rows are one group if that takes no more than the budget and what it spares.
    """
    whole, row = rows_at_once(total, cost.whole, room), cost.half + cost.ends
    size, at_once = (_power_of_rows(left // cost.chunk) for left in (room // _OF_GROUP, room + spared - total * row))
    if whole < total and at_once >= max(1, min(size, _LEAST_ROWS)):
        at_once = min(at_once, _power_of_rows(total - 1))  # two chunks at least, or nothing would be kept
        return at_once, -(-total // at_once) * at_once
    most = min(_MOST_ROWS, (room - size * cost.chunk) // row)
    size = _power_of_rows(min(size, most))
    if not size or whole >= min(most, total):
        return whole, whole
    unit = max(size, _WAVE) if most >= _WAVE else size
    alike = -(-total // -(-total // most))
    group = min(-(-alike // unit), most // unit) * unit
    return (size, group) if group > max(size, whole) else (whole, whole)


def _power_of_rows(most: int) -> int:
    """The largest power of two up to a wave's rows that is at most `most`; 0 where that is less than 1."""
    return (1 << min(_WAVE, max(0, most)).bit_length()) >> 1


def _tile(cost: _Cost, rows: int, width: int, room: int, parts: int) -> tuple[int, int]:
    least = min(width, _LEAST_COLUMNS)
    most = max(1, min(rows, room // (cost.ends + cost.logit * least)))
    if cost.shared:
        most = max(1, min(most, _MOST_ROWS // parts))  # something runs beside the collectives of the other rows
    most = -(-rows // -(-rows // most))  # alike
    columns = max(1, min(width, (room // most - cost.ends) // cost.logit))
    if _ALIGN <= columns < width:
        columns -= columns % _ALIGN
    even = -(-width // -(-width // columns))
    if cost.on_card and (waves := -(-even // _WAVE_COLUMNS) * _WAVE_COLUMNS) <= columns:
        return most, waves
    return most, min(columns, -(-even // _ALIGN) * _ALIGN)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of kept logits: float16, as z − max z, for low-precision operands, which p forgives; else theirs."""
    return torch.float16 if dtype in (torch.bfloat16, torch.float16) else dtype


def half_bytes(columns: int) -> int:
    """Bytes of a row of `HalfLogits`."""
    return columns * torch.float16.itemsize + tops_of(columns) * torch.float32.itemsize


@dataclass(frozen=True)
class LossRows:
    """Rows to project: `order[part, i]` is the i-th of each part, those that carry loss first.

    The order of all rows is that of the gathered hidden states: part 0's rows, then part 1's. Only as many of the order
    are kept as carry loss on any part: counted by the host where the mask lies in its memory, else bounded by the caller.
    """

    order: Tensor  # [parts, n]
    rows_per_part: int  # R
    rank: int  # this rank's part
    excess: Tensor | None  # 0-dim bool: more rows carry loss than the bound said

    @classmethod
    def of(cls, keep: Tensor, parts: int, bound: int | None, group: ProcessGroup | None) -> LossRows:
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
        return cls(order, total, group_rank(group) if parts > 1 else 0, excess)

    def spans(self, size: int) -> list[slice]:
        """Slices of the order, `size` rows each."""
        end = self.order.shape[1]
        return [slice(at, min(at + size, end)) for at in range(0, end, size)]

    def own(self, span: slice) -> Tensor:
        """Indices of a span's rows among this rank's hidden states."""
        return self.order[self.rank, span]

    def gathered(self, span: slice) -> Tensor:
        """Indices of a span's rows of all parts, in the gathered order."""
        part = self.order[:, span]
        offsets = torch.arange(part.shape[0], device=part.device)[:, None] * self.rows_per_part
        return (part + offsets).reshape(-1)
