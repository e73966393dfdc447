"""Rows of hidden states that an LM head projects, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from parallel_rl.groups import group_rank

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

#: an index of rows: a slice for adjacent rows, which gives a view, else a tensor
Rows = slice | torch.Tensor


@dataclass(frozen=True)
class LossRows:
    """Rows to project: `order[part, i]` is the i-th of each part, loss-carrying rows first.

    Gathered hidden states are ordered part by part. The order is as long as the most loss-carrying rows of a part: counted on
    the host if the mask is there, else bounded by the caller.
    """

    order: Tensor | None  # [parts, count]; None: all rows in order
    parts: int
    count: int  # rows of each part that are projected
    rows_per_part: int  # R
    rank: int  # this rank's part
    excess: Tensor | None  # 0-dim bool: more rows carry loss than the bound
    device: torch.device

    @classmethod
    def of(cls, keep: Tensor, parts: int, bound: int | None, group: ProcessGroup | None) -> LossRows:
        mask = keep.view(parts, -1)
        total, excess = mask.shape[1], None
        needed = total if bound is None else min(bound, total)
        if keep.device.type == "cpu":  # free: the host reads its own memory
            needed = min(needed, int(mask.numpy().sum(1).max(initial=0)))
        if bound is not None:
            excess = mask.sum(1).amax() > bound if total else None
        order = None
        if needed < total:
            order = torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True)[:, :needed]
        return cls(order, parts, needed, total, group_rank(group) if parts > 1 else 0, excess, keep.device)

    def spans(self, size: int) -> list[slice]:
        return [slice(at, min(at + size, self.count)) for at in range(0, self.count, size)]

    def own(self, span: slice) -> Rows:
        """Return the indices of a span's rows among this rank's hidden states."""
        return span if self.order is None else self.order[self.rank, span]

    def own_gathered(self, span: slice) -> Rows:
        """Return the indices of the same rows in gathered order."""
        rows, offset = self.own(span), self.rank * self.rows_per_part
        return slice(rows.start + offset, rows.stop + offset) if isinstance(rows, slice) else rows + offset

    def gathered(self, *spans: slice) -> Rows:
        """Return the gathered indices of all parts' rows of consecutive spans, span after span."""
        if self.parts == 1:
            return self.own(slice(spans[0].start, spans[-1].stop))
        return torch.cat([self._of_parts(span) for span in spans])

    def _of_parts(self, span: slice) -> Tensor:
        indices = (
            self.order[:, span] if self.order is not None else torch.arange(span.start, span.stop, device=self.device)
        )
        offsets = torch.arange(self.parts, device=self.device)[:, None] * self.rows_per_part
        return (indices + offsets).reshape(-1)


def put_rows(target: Tensor, rows: Rows, values: Tensor) -> None:
    if isinstance(rows, slice):
        target[rows].copy_(values)
    else:
        target.index_copy_(0, rows, values.to(target.dtype))
