"""Sums over neighbouring positions, and their adjoint: deterministic, without a loop over segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def sum_segments(x: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """Sum [T] over segments of neighbours, in float64: [n]; differentiable, deterministic (no index_add).

    >>> sum_segments(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]), torch.tensor([0, 0, 1])).tolist()
    [3.0, 4.0]

    Args:
        offsets: [n + 1] bounds, from 0 to T.
        ids: [T] the segment of each position.
    """
    summed: Tensor = _Sum.apply(x.to(torch.float64), offsets, ids)
    return summed


def expand_segments(per_segment: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """Expand [n] to [T] by segment; the gradient is the segment sum. Args: see `sum_segments`.

    >>> expand_segments(torch.tensor([3.0, 4.0]), torch.tensor([0, 2, 3]), torch.tensor([0, 0, 1])).tolist()
    [3.0, 3.0, 4.0]
    """
    expanded: Tensor = _Expand.apply(per_segment, offsets, ids)
    return expanded


def sum_groups(x: Tensor, index: Tensor, number: int) -> Tensor:
    """Sum [M] over the places of each group: [number], in float64, with the same bits on every device.

    >>> sum_groups(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]), 3).tolist()
    [2.0, 5.0, 0.0]

    `index` is [M], the group of each place, from 0 to `number` − 1.
    """
    groups = Groups.of(index, number)
    return sum_segments(x[groups.order], groups.offsets, groups.ids)


@dataclass(frozen=True, eq=False)
class Groups:
    """A map from M places to n values that several places may share, with what its adjoint needs.

    Attributes:
        index: [M] the value of each place.
        order: [M] the places, those of one value as neighbours.
        ids: [M] the value of each place in that order.
        offsets: [n + 1] bounds of the values in that order.
    """

    index: Tensor
    order: Tensor
    ids: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, index: Tensor, number: int) -> Groups:
        """Sort the places [M] of `number` values."""
        order = index.argsort(stable=True)
        ids = index[order]
        return cls(index, order, ids, torch.searchsorted(ids, torch.arange(number + 1, device=index.device)))

    def to(self, device: torch.device | str | None) -> Groups:
        """Move the tensors, without a wait."""
        moved = (x.to(device, non_blocking=True) for x in (self.index, self.order, self.ids, self.offsets))
        return Groups(*moved)

    def take(self, values: Tensor) -> Tensor:
        """Take [n, ...] to the places, [M, ...]; the gradient is summed in one order on every device and rank.

        >>> Groups.of(torch.tensor([1, 0, 1]), 2).take(torch.tensor([3.0, 5.0])).tolist()
        [5.0, 3.0, 5.0]
        """
        places: Tensor = _Take.apply(values, self.index, self.order, self.offsets)
        return places

    def any(self, mask: Tensor) -> Tensor:
        """Return for each value [n] whether one of its places [M] is marked."""
        none = torch.zeros(len(self.offsets) - 1, dtype=torch.uint8, device=mask.device)
        return none.scatter_reduce(0, self.index, mask.to(torch.uint8), "amax").bool()


@dataclass(frozen=True, eq=False)
class SharedRows:
    """How the flat tokens [F] of a context rank share the R rows of its logits, and their edges.

    Edges of branching rows follow: X more. A row with one edge is scored by its own target.

    Attributes:
        rows: the row of each flat token, F places of R values.
        edges: the edge of each flat token, F places of R + X values.
        targets: [R + X] a flat token of each edge, and −1 at a row that has none or several.
        branches: [X] the row of each further edge.
        chunk: [B, S] counts along a sequence how often its rows have passed to another context rank.
        cuts: the largest of these counts.
    """

    rows: Groups
    edges: Groups
    targets: Tensor
    branches: Tensor
    chunk: Tensor
    cuts: int


def sum_sorted(x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """Sum [M, ...] over the places of each value, [n, ...], without atomics; see `Groups`."""
    return torch.segment_reduce(x[order], "sum", offsets=offsets, initial=0, unsafe=True)


def running_sum(x: Tensor) -> Tensor:
    """Sum [..., n] up to each place of the last dimension, by doubling; deterministic, unlike `cumsum`."""
    step = 1
    while step < x.shape[-1]:
        x = torch.cat([x[..., :step], x[..., step:] + x[..., :-step]], -1)
        step *= 2
    return x


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, ids)
        return torch.segment_reduce(x, "sum", offsets=offsets, initial=0, unsafe=True)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        offsets, ids = ctx.saved_tensors  # type: ignore[attr-defined]
        return _Expand.apply(grad, offsets, ids), None, None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, per_segment: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, ids)
        return per_segment[ids]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        offsets, ids = ctx.saved_tensors  # type: ignore[attr-defined]
        return _Sum.apply(grad.to(torch.float64), offsets, ids).to(grad.dtype), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, values: Tensor, index: Tensor, order: Tensor, offsets: Tensor
    ) -> Tensor:
        ctx.save_for_backward(index, order, offsets)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, order, offsets = ctx.saved_tensors  # type: ignore[attr-defined]
        dtype = torch.float64 if grad.dim() == 1 else torch.promote_types(grad.dtype, torch.float32)
        if grad.device.type == "cpu":  # in the same order, and ten times faster
            summed = torch.zeros(len(offsets) - 1, *grad.shape[1:], dtype=dtype)
            return summed.index_add_(0, index, grad.to(dtype)).to(grad.dtype), None, None, None
        summed = sum_sorted(grad.to(dtype), order, offsets)
        return summed.to(grad.dtype), None, None, None
