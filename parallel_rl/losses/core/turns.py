"""Turns, runs of one id among the valid tokens of a sequence: sums, means and maxima over them.

Only the device knows their number. To avoid a wait, a rank has one slot per position for its turns. Turns that are cut between
context ranks meet in one of [B, 2·cp − 1] places, named by the chunk where the turn begins. No two of them begin in one chunk
and end beyond it, so one all-reduce of these places suffices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from parallel_rl.groups import group_size, group_sum
from parallel_rl.segments import expand_segments, sum_segments

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.layout import SequenceLayout


def turn_starts(segment_ids: Tensor, valid: Tensor) -> Tensor:
    """Return [B, S] bool: the first valid token of each turn; ids of invalid tokens do not matter.

    >>> ids, valid = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[False, True, True, False, True]])
    >>> turn_starts(ids, valid).tolist()
    [[False, True, True, False, False]]
    """
    before = _latest_valid(valid)
    return valid & ((before < 0) | (segment_ids.gather(1, before.clamp(min=0)) != segment_ids))


def check_segment_ids(segment_ids: Tensor, valid: Tensor) -> None:
    before = _latest_valid(valid)
    previous = segment_ids.gather(1, before.clamp(min=0))
    wrong = valid & (before >= 0) & (previous > segment_ids)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"segment_ids must not decrease within a sequence; at [{row}, {column}] {int(segment_ids[row, column])} "
            f"follows {int(previous[row, column])}"
        )


def _latest_valid(valid: Tensor) -> Tensor:
    """Return [B, S] the column of the last valid token before each one, −1 if there is none."""
    columns = torch.arange(valid.shape[1], device=valid.device)
    latest = torch.where(valid, columns, -1).cummax(1).values
    return torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)


@dataclass(frozen=True, eq=False)
class TurnLayout:
    """Turns of a rank's local positions; masked positions belong to some turn and need a neutral value.

    Attributes:
        ids, offsets: [T_local] the slot of each position; [T_local + 1] bounds of the slots, those beyond the last turn empty.
        meeting: [T_local] where the parts of a slot's turn meet, in [0, places); `places` for a whole turn.
        places: B·(2·cp − 1).
        tokens: [T_local] at each position the valid tokens of its turn, over all context ranks.
    """

    ids: Tensor
    offsets: Tensor
    meeting: Tensor
    places: int
    tokens: Tensor

    @classmethod
    def of(cls, layout: SequenceLayout, segment_ids: Tensor, valid: Tensor, shift: bool = True) -> TurnLayout:
        rows, width = layout.shape
        columns, row = torch.arange(width, device=valid.device), torch.arange(rows, device=valid.device)[:, None]
        starts = torch.where(turn_starts(segment_ids, valid), columns, 0).cummax(1).values
        key = row * width + starts
        slots = key.new_zeros(2, rows * width)
        ends = slots[0].scatter_reduce(0, key.flatten(), (valid * columns).flatten(), "amax")[key]
        tokens = slots[1].scatter_add(0, key.flatten(), valid.flatten().to(key.dtype))[key]
        first, last = (_chunk(layout, column - int(shift)) for column in (starts, ends))
        cuts = 2 * layout.cp_size - 1 if layout.tree is None else layout.tree.cuts
        meeting = torch.where(first < last, row * cuts + first.clamp(0, cuts - 1), rows * cuts)
        key, meeting, tokens = (layout.take(x, shift) for x in (key, meeting, tokens))
        ids = (torch.nn.functional.pad(key.diff(), (min(len(key), 1), 0)) != 0).cumsum(0)
        offsets = torch.searchsorted(ids, torch.arange(len(ids) + 1, device=ids.device))
        first_place = offsets[:-1].clamp(max=max(len(ids) - 1, 0))
        meeting = torch.where(offsets[:-1] < offsets[1:], meeting[first_place], rows * cuts)
        return cls(ids, offsets, meeting, rows * cuts, tokens)

    def sum(self, x: Tensor, context_group: ProcessGroup | None = None) -> Tensor:
        """Sum x [T_local] over each turn in float64; differentiable, one all-reduce of `places` floats."""
        summed = sum_segments(x, self.offsets, self.ids)
        if group_size(context_group) > 1:
            parts = summed.new_zeros(self.places + 1).scatter(0, self.meeting, summed)
            met = group_sum(parts[:-1], context_group)
            divided = self.meeting < self.places
            summed = torch.where(divided, torch.nn.functional.pad(met, (0, 1))[self.meeting], summed)
        return expand_segments(summed, self.offsets, self.ids).to(x.dtype)

    def max(self, x: Tensor, context_group: ProcessGroup | None = None) -> Tensor:
        """Take the maximum of x [T_local] over each position's turn, on all context ranks; no gradient."""
        most = x.new_full(x.shape, -torch.inf).scatter_reduce(0, self.ids, x.detach(), "amax")
        if group_size(context_group) > 1:
            met = x.new_full((self.places + 1,), -torch.inf).scatter(0, self.meeting, most)
            dist.all_reduce(met, op=dist.ReduceOp.MAX, group=context_group)
            most = torch.where(self.meeting < self.places, met[self.meeting], most)
        return most[self.ids]


def _chunk(layout: SequenceLayout, positions: Tensor) -> Tensor:
    if layout.tree is not None:
        return layout.tree.chunk.gather(1, positions.clamp(min=0))
    first, size = (bounds[:, None] for bounds in layout.chunks)
    return (first + positions.clamp(min=0)) // size.clamp(min=1)
