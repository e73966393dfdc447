"""Plan of the LM head: the rows that are projected together and the logits that are kept, for a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch

from parallel_rl.groups import group_rank, group_size
from parallel_rl.vocab.backends.torch_backend import math_dtype

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


@dataclass(frozen=True)
class Plan:
    """Chunks and tiles that the rows of every part are cut into.

    A row's statistics need all its logits, so that forward projects `size` rows at a time. Once they are known any columns do:
    backward projects tiles of as many rows as the budget allows, since each pass over the rows writes the whole gradient of
    the weight, and each tile that of its hidden states.

    Attributes:
        size: rows of a chunk, whose logits exist whole.
        resident: all logits are kept until the backward.
        kept_together: rows of kept logits that are multiplied together, one chunk or several.
        tile: (rows, columns) that are projected again together; where a row is truncated, a chunk as in forward.
    """

    size: int
    resident: bool
    kept_together: int
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
) -> Plan:
    """Make the plan for [R, D] hidden rows a part and `width` columns a rank, alike on all ranks that share a batch.

    Args:
        shared: other ranks work on the same rows.
        in_place: the gradient of kept logits is written over them, see `LinearParams.grad_in_operand_dtype`.
        whole_rows: logits that are projected again must have the bits that they had in forward.

    Raises:
        ValueError: a budget that is too small for one row of each part.
    """
    total = hidden.shape[0]
    cost = _Cost.of(hidden, width, shared, parts)
    kept = parts * width * kept_dtype(hidden.dtype).itemsize
    room = budget_bytes(budget, hidden.device)
    if room < cost.whole:
        if budget is not None:
            raise ValueError(
                f"budget = {budget} bytes is too small for one row of logits with what its gradient needs, "
                f"{cost.whole} bytes at {width} columns and {hidden.shape[1]} hidden"
            )
        room = cost.whole  # a default never refuses
    resident = mode == "resident" or (mode == "auto" and total * kept + cost.whole <= room)
    rest = room - total * kept if resident and mode == "auto" else room
    size = rows_at_once(total, cost.whole, rest)
    together = in_place and parts == 1  # the rows of several parts lie chunk by chunk
    kept_together = size * max(1, rest // (size * max(cost.ends, 1))) if together else size
    tile = (size, width) if whole_rows else _tile(cost, max(total, 1), width, room, parts)
    return Plan(size, resident, kept_together, tile)


class _Cost(NamedTuple):
    """Bytes of one row of each part, beyond the gradients."""

    whole: int  # its logits, all of it at once
    ends: int  # its hidden states and their gradient
    logit: int  # one column of its logits
    shared: bool  # other ranks work on the same rows

    @classmethod
    def of(cls, hidden: Tensor, width: int, shared: bool, parts: int) -> _Cost:
        dtype = math_dtype(hidden.dtype)
        low = hidden.dtype.itemsize if hidden.device.type != "cpu" and dtype != hidden.dtype else 0  # for the products
        buffers = 2 if shared else 1  # the next rows are projected while these ones' statistics travel
        ends = parts * buffers * 2 * hidden.shape[1] * dtype.itemsize
        return cls(
            ends + parts * width * buffers * (dtype.itemsize + low), ends, parts * (dtype.itemsize + low), shared
        )


def _tile(cost: _Cost, rows: int, width: int, room: int, parts: int) -> tuple[int, int]:
    least = min(width, _LEAST_COLUMNS)
    most = max(1, min(rows, room // (cost.ends + cost.logit * least)))
    if cost.shared:
        most = max(1, min(most, _MOST_ROWS // parts))  # something runs beside the collectives of the other rows
    most = -(-rows // -(-rows // most))  # alike
    columns = max(1, min(width, (room // most - cost.ends) // cost.logit))
    even = -(-width // -(-width // columns))
    return most, min(columns, -(-even // _ALIGN) * _ALIGN)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of kept logits: float16, as z − max z, for low-precision operands, which p forgives; else theirs."""
    return torch.float16 if dtype in (torch.bfloat16, torch.float16) else dtype


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
