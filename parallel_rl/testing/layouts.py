"""Layouts, their process groups and their cuts, from lists of positions: independent of `SequenceLayout`'s errors."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.groups import ParallelGroups
from parallel_rl.layout import CPLayout
from parallel_rl.prefix_tree import PrefixTree, build_tree


class Layout(NamedTuple):
    tp: int
    cp: int
    dp: int
    packing: str  # padded, packed, packed+padding, tree
    micro_batches: int
    cp_layout: CPLayout
    pp: int = 1  # only through Megatron's schedule

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def axes(self) -> frozenset[str]:
        """List the differences from one process with padded rows, as names of `EVERY_AXIS`."""
        used = {
            "tensor": self.tp > 1,
            "context": self.cp > 1,
            "data": self.dp > 1,
            "micro-batches": self.micro_batches > 1,
            "packing": self.packing != "padded",
            "prefix trees": self.packing == "tree",
        }
        return frozenset(name for name, differs in used.items() if differs)

    @property
    def name(self) -> str:
        stages = f".pp{self.pp}" if self.pp > 1 else ""
        return f"tp{self.tp}.cp{self.cp}.dp{self.dp}{stages}.{self.packing}.mb{self.micro_batches}.{self.cp_layout}"


# run first if a check takes only some: two have every dimension and packing, six most combinations of settings
_FIRST = {
    4: (
        "tp2.cp2.dp1.packed+padding.mb3.zigzag",
        "tp2.cp1.dp2.padded.mb3.zigzag",
        "tp1.cp2.dp2.packed.mb3.contiguous",
        "tp4.cp1.dp1.packed+padding.mb1.zigzag",
        "tp2.cp2.dp1.packed.mb1.contiguous",
        "tp1.cp2.dp2.padded.mb1.zigzag",
    ),
    8: ("tp2.cp2.dp2.packed+padding.mb3.zigzag", "tp4.cp2.dp1.packed.mb3.contiguous", "tp4.cp1.dp2.padded.mb3.zigzag"),
}


def default_layouts(world: int) -> list[Layout]:
    """Return a check's layouts: one axis at a time up to two ranks, several together on four and eight."""
    if world == 1:
        padded = Layout(1, 1, 1, "padded", 1, "zigzag")
        packed = [padded._replace(packing=packing) for packing in ("packed", "packed+padding", "tree")]
        return [padded, padded._replace(micro_batches=3), *packed]
    if world == 2:
        split = Layout(1, 2, 1, "padded", 1, "zigzag")
        return [
            Layout(2, 1, 1, "padded", 1, "zigzag"),
            Layout(2, 1, 1, "packed", 1, "zigzag"),
            split,
            split._replace(cp_layout="contiguous"),
            split._replace(packing="packed"),
            split._replace(packing="tree"),
            Layout(1, 1, 2, "padded", 1, "zigzag"),
        ]
    return layouts(world, 3 if world == 4 else 1)


def layouts(world: int, number: int | None = None) -> list[Layout]:
    """Combine TP {1, 2, 4}, CP {1, 2}, DP {1, 2}, packing and micro-batches {1, 3}; at most `number`."""
    grids = [(tp, cp, dp) for tp in (1, 2, 4) for cp in (1, 2) for dp in (1, 2) if tp * cp * dp == world]
    chosen = [
        Layout(*grid, packing, micro_batches, cp_layout)
        for grid in grids
        for packing in ("padded", "packed", "packed+padding")
        for micro_batches in (1, 3)
        for cp_layout in (("zigzag", "contiguous") if grid[1] > 1 else ("zigzag",))
    ]
    first = _FIRST.get(world, ())
    chosen.sort(key=lambda layout: first.index(layout.name) if layout.name in first else len(first))
    return chosen[:number]


class Rank(NamedTuple):
    """This process in a layout: its groups, its (tensor, context, data) place, its device."""

    groups: ParallelGroups
    place: tuple[int, int, int]
    device: torch.device = torch.device("cpu")


def make_groups(
    rank: int, world: int, tp: int, cp: int, timeout: timedelta | None = None
) -> tuple[ParallelGroups, tuple[int, int, int]]:
    """Make groups, tensor ranks adjacent, then context, then data; return them with this rank's place.

    `timeout` is for their collectives; None is half an hour.
    """
    place = (rank % tp, rank // tp % cp, rank // (tp * cp))
    ranks = torch.arange(world).view(-1, cp, tp)

    def group_of(lists: Tensor) -> dist.ProcessGroup | None:
        mine = None
        for members in lists.tolist():
            group = dist.new_group(members, timeout=timeout) if len(members) > 1 else None
            mine = group if rank in members else mine
        return mine

    return ParallelGroups(
        tensor=group_of(ranks.reshape(-1, tp)),
        context=group_of(ranks.transpose(1, 2).reshape(-1, cp)),
        data=group_of(ranks.permute(1, 2, 0).reshape(cp * tp, -1)),
        data_context=group_of(ranks.permute(2, 0, 1).reshape(tp, -1)),
    ), place


def _cut(length: int, cp: int, rank: int, cp_layout: str) -> list[int]:
    if cp == 1:
        return list(range(length))
    if cp_layout == "contiguous":
        return list(range(rank * length // cp, (rank + 1) * length // cp))
    chunk = length // (2 * cp)
    first, last = rank, 2 * cp - 1 - rank
    return [*range(first * chunk, (first + 1) * chunk), *range(last * chunk, (last + 1) * chunk)]


class Piece(NamedTuple):
    """A micro-batch on one rank: the (row, column) of each local position (None: padding), and cu_seqlens.

    In the row of a `tree`, a shared position belongs to its first token.
    """

    rows: list[int]
    places: list[tuple[int, int] | None]
    cu_seqlens: Tensor | None
    cu_seqlens_padded: Tensor | None
    tree: PrefixTree | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the logits' leading dimensions: [B, S/cp], packed [1, T/cp]."""
        one_row = self.cu_seqlens is not None or self.tree is not None
        return (1, len(self.places)) if one_row else (len(self.rows), len(self.places) // len(self.rows))

    def joined(self, whole: Tensor) -> Tensor:
        """Sum [B, S, ...] over tokens that share a position, at the first of them; unchanged without a tree."""
        if self.tree is None:
            return whole
        rows, columns = self.tree.real.nonzero().unbind(1)
        at = torch.tensor(self.rows)[rows], columns
        first = torch.tensor(_first_places(self.rows, self.tree))[self.tree.where[rows, columns]].unbind(1)
        return torch.zeros_like(whole).index_put(first, whole[at], accumulate=True)

    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, columns, and validity of the local positions."""
        pairs = torch.tensor([(-1, 0) if at is None else at for at in self.places])
        return pairs[:, 0].clamp(min=0), pairs[:, 1], pairs[:, 0] >= 0


def cut_rows(
    rows: list[int], lengths: list[int], width: int, layout: Layout, cp_rank: int, ids: Tensor | None = None
) -> Piece:
    """Cut rows of `width` columns for one context rank; `ids` [B, S] of the batch say what a tree shares."""
    if layout.packing == "tree":
        assert ids is not None
        return _cut_tree(
            rows, build_tree(ids[rows], torch.tensor(lengths)[rows], multiple_of=2 * layout.cp), layout, cp_rank
        )
    if layout.packing == "padded":
        cut = _cut(width, layout.cp, cp_rank, layout.cp_layout)
        return Piece(rows, [(row, column) for row in rows for column in cut], None, None)
    unit = max(4, 2 * layout.cp)
    room = [-(-lengths[row] // unit) * unit for row in rows]
    true = room if layout.packing == "packed" else [lengths[row] for row in rows]
    if layout.packing == "packed+padding":
        room[-1] += 2 * unit  # the alignment padding belongs to the last sequence
    whole = [[(row, t) if t < width else None for t in range(size)] for row, size in zip(rows, room, strict=True)]
    if layout.cp_layout == "zigzag":
        places = [sequence[t] for sequence in whole for t in _cut(len(sequence), layout.cp, cp_rank, "zigzag")]
    else:
        flat = [place for sequence in whole for place in sequence]
        places = [flat[t] for t in _cut(len(flat), layout.cp, cp_rank, "contiguous")]
    sums = [torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (true, room)]
    return Piece(rows, places, sums[0], None if layout.packing == "packed" else sums[1])


def _cut_tree(rows: list[int], tree: PrefixTree, layout: Layout, cp_rank: int) -> Piece:
    bounds = [0, tree.row_length] if layout.cp_layout == "contiguous" else tree.bounds.tolist()
    held = [
        first + place
        for first, last in pairwise(bounds)
        for place in _cut(last - first, layout.cp, cp_rank, layout.cp_layout)
    ]
    first_places = _first_places(rows, tree)
    places = [first_places[position] for position in held]
    return Piece(rows, [None if at[0] < 0 else at for at in places], None, None, tree)


def _first_places(rows: list[int], tree: PrefixTree) -> list[tuple[int, int]]:
    """Find the first (row, column) of the batch at each position of a tree's row; (-1, 0) at padding."""
    places = [(-1, 0)] * tree.row_length
    for row, length, positions in reversed(list(zip(rows, tree.lengths.tolist(), tree.where.tolist(), strict=True))):
        for column in range(length):
            places[positions[column]] = row, column
    return places
