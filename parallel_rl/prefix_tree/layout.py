"""The layout of a prefix tree's row: which logits row each flat token of a context rank reads, and which edge it is.

A token is the target of one row, that of the token before it on its path. An *edge* is such a pair of a row and a target:
several flat tokens may be one edge, and a row where the tree branches has several edges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.segments import Groups, SharedRows

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.prefix_tree.tree import PrefixTree


def tree_layout(
    tree: PrefixTree,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_layout: CPLayout = "zigzag",
    device: torch.device | str | None = None,
) -> SequenceLayout:
    """Lay out the flat tokens of a tree's row: the logits are [1, T/cp, V/tp].

    A flat token is local where its row is. Zigzag cuts every tree into 2·cp chunks, contiguous the whole row into cp parts.

    Raises:
        ValueError: a row or a tree that does not divide.
    """
    owner = torch.empty(tree.row_length, dtype=torch.int64)
    local = torch.empty(tree.row_length, dtype=torch.int64)
    for rank in range(cp_size):
        row = SequenceLayout.packed(
            tree.bounds,
            seq_len=tree.row_length,
            total=tree.row_length,
            cp_size=cp_size,
            cp_rank=rank,
            cp_layout=cp_layout,
        )
        places = tree.bounds[row.sequence_ids] + row.positions
        owner[places], local[places] = rank, torch.arange(len(places))
    width = tree.where.shape[1]
    owners = torch.where(tree.real, owner[tree.where], -1)
    here = (owners == cp_rank) & _read(tree)
    sequences, positions = here.nonzero().unbind(1)
    rows = local[tree.where[here]]
    count = tree.row_length // cp_size
    edges, targets, branches = _edges(tree, sequences, positions, rows, count)
    chunk = torch.nn.functional.pad(owners[:, 1:] != owners[:, :-1], (1, 0)).cumsum(1)
    chunk = torch.where(tree.real, chunk, 0)
    where = tree.where.device if device is None else device

    def move(x: Tensor) -> Tensor:
        return x.to(where, non_blocking=True)

    lengths = move(tree.lengths)
    return SequenceLayout(
        shape=(len(tree.where), width),
        sequence_ids=move(sequences),
        positions=move(positions),
        offsets=move(torch.nn.functional.pad(here.sum(1).cumsum(0), (1, 0))),
        lengths=lengths,
        local_shape=(1, count),
        chunks=(torch.zeros_like(lengths), torch.ones_like(lengths)),
        cp_size=cp_size,
        tree=SharedRows(
            Groups.of(rows, count).to(where),
            edges.to(where),
            move(targets),
            move(branches),
            move(chunk),
            int(chunk.max()),
        ),
    )


def _read(tree: PrefixTree) -> Tensor:
    """[B, S] bool: places whose token, or whose next token, may carry loss."""
    if tree.scored is None:
        return tree.real
    scored = tree.scored & tree.real
    return scored | torch.nn.functional.pad(scored[:, 1:], (0, 1))


def _edges(
    tree: PrefixTree, sequences: Tensor, positions: Tensor, rows: Tensor, count: int
) -> tuple[Groups, Tensor, Tensor]:
    """Find the edges of the flat tokens: their places, a flat token of each, and the rows of the further ones."""
    flat = torch.arange(len(rows))
    scored = positions + 1 < tree.lengths[sequences]
    target = tree.input_ids[sequences, (positions + 1).clamp(max=tree.where.shape[1] - 1)]
    target = target - target.min() if len(target) else target
    span = int(target.max()) + 1 if len(target) else 1
    keys, edge = torch.unique(rows[scored] * span + target[scored], return_inverse=True)
    row_of_edge = keys // span
    first = torch.full((len(keys),), len(rows)).scatter_reduce(0, edge, flat[scored], "amin")
    branching = torch.bincount(row_of_edge, minlength=count)[row_of_edge] > 1
    slot = torch.where(branching, count - 1 + branching.cumsum(0), row_of_edge)
    targets = torch.full((count + int(branching.sum()),), -1).index_put((slot,), first)
    index = rows.clone()  # where nothing is predicted any slot of the row serves
    index[scored] = slot[edge]
    return Groups.of(index, len(targets)), targets, row_of_edge[branching]
