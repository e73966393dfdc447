"""The tree itself: the row position of each flat token, and the layout of its row.

A token is the target of one row, that of the token before it on its path. An *edge* is such a pair of a row and a target:
several flat tokens may be one edge, and a row where the tree branches has several edges.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.segments import Groups, SharedRows
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Sequences in one row that holds each shared prefix once; made by `build_tree` or `from_nodes`.

    >>> from parallel_rl.prefix_tree import build_tree
    >>> tree = build_tree(torch.tensor([[7, 8, 1], [7, 8, 2]]), torch.tensor([3, 3]))
    >>> tree.where.tolist(), tree.depth.tolist(), tree.before.tolist()
    ([[0, 1, 2], [0, 1, 3]], [0, 1, 2, 2], [-1, 0, 1, 1])

    All tensors are int64 on the host. Several trees stand one after the other in the row.

    Attributes:
        input_ids: [B, S] the tokens; anything beyond a sequence's length.
        lengths: [B] tokens of each sequence.
        where: [B, S] the row position of each flat token; 0 beyond a sequence's length.
        order: [B] the sequences depth-first: the tokens that each adds to the row are neighbours there.
        shared: [B] leading tokens that an earlier sequence of `order` has in the row already.
        bounds: [trees + 1] where each tree begins in the row, with its padding; the last is the row's length T.
        scored: [B, S] bool, the flat tokens that may carry loss; None: all. A loss looks up no other one.
    """

    input_ids: Tensor
    lengths: Tensor
    where: Tensor
    order: Tensor
    shared: Tensor
    bounds: Tensor
    scored: Tensor | None = None
    _layouts: dict[tuple[object, ...], SequenceLayout] = field(default_factory=dict, init=False, repr=False)
    _owners: dict[tuple[int, CPLayout], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def row_length(self) -> int:
        """T: positions of the row, padding included."""
        return int(self.bounds[-1])

    @cached_property
    def tokens(self) -> int:
        """Tokens that the row holds."""
        return int((self.lengths - self.shared).sum())

    @cached_property
    def flat_tokens(self) -> int:
        """Tokens that the sequences have, each counted by itself."""
        return int(self.lengths.sum())

    @property
    def saved(self) -> float:
        """Part of the flat tokens that the row leaves out."""
        return 1 - self.tokens / max(self.flat_tokens, 1)

    @cached_property
    def real(self) -> Tensor:
        """[B, S] bool: the columns that hold a token."""
        return torch.arange(self.where.shape[1]) < self.lengths[:, None]

    @cached_property
    def depth(self) -> Tensor:
        """[T] the place of each row token on its path, 0 for a root and for padding: the model's position ids."""
        columns = torch.arange(self.where.shape[1]).expand_as(self.where)
        return torch.zeros(self.row_length, dtype=torch.int64).index_put((self.where[self.real],), columns[self.real])

    @cached_property
    def before(self) -> Tensor:
        """[T] the row position of the token before each on its path; −1 for a root and for padding."""
        previous = torch.nn.functional.pad(self.where[:, :-1], (1, 0), value=-1)
        empty = torch.full((self.row_length,), -1)
        return empty.index_put((self.where[self.real],), previous[self.real])

    def layout(
        self,
        *,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_layout: CPLayout = "zigzag",
        device: torch.device | str | None = None,
    ) -> SequenceLayout:
        """Lay out the flat tokens of a context rank, whose logits are [1, T/cp, V/tp]; computed once.

        A flat token is local where its row is. Zigzag cuts every tree into 2·cp chunks, contiguous the whole row into cp parts.

        Raises:
            ValueError: a row or a tree that does not divide.
        """
        home = torch.device("cpu" if device is None else device)
        key = cp_size, cp_rank, cp_layout, home
        if key not in self._layouts:
            self._layouts[key] = _layout(self, cp_size, cp_rank, cp_layout, home)
        return self._layouts[key]

    def owners(self, cp_size: int, cp_layout: CPLayout) -> tuple[Tensor, Tensor]:
        """Find each row position's context rank [T], and its place there; cached. ValueError if uneven."""
        if (cp_size, cp_layout) in self._owners:
            return self._owners[cp_size, cp_layout]
        owner, local = torch.empty(2, self.row_length, dtype=torch.int64)
        for rank in range(cp_size):
            row = SequenceLayout.packed(
                self.bounds, seq_len=self.row_length, total=self.row_length,
                cp_size=cp_size, cp_rank=rank, cp_layout=cp_layout,
            )  # fmt: skip
            places = self.bounds[row.sequence_ids] + row.positions
            owner[places], local[places] = rank, torch.arange(len(places))
        self._owners[cp_size, cp_layout] = owner, local
        return owner, local

    def padded_to(self, row_length: int) -> PrefixTree:
        """Return the tree with a longer row, padded in its last tree; ValueError for a shorter one."""
        if row_length < self.row_length:
            raise ValueError(
                f"row_length = {row_length} is less than the {self.row_length} positions of the tree's row"
            )
        bounds = self.bounds.clone()
        bounds[-1] = row_length
        return replace(self, bounds=bounds)

    def check_data(self, input_ids: Tensor, scored: Tensor) -> None:
        """Check that data [B, S] are those of the tree, where values are checked.

        Args:
            scored: [B, S] bool, the tokens that carry loss.

        Raises:
            ValueError: other tokens, a scored token that the tree leaves out.
        """
        if not checks_values(input_ids):
            return
        wrong = (input_ids.cpu() != self.input_ids) & self.real
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"input_ids[{row}, {column}] is {int(input_ids[row, column])}, the tree was built with "
                f"{int(self.input_ids[row, column])}; build it from the same data"
            )
        if self.scored is not None and bool((left_out := scored.cpu() & ~self.scored).any()):
            row, column = left_out.nonzero()[0].tolist()
            raise ValueError(
                f"the loss scores the token at [{row}, {column}], but the tree was built with token_mask 0 there; build it "
                "with the mask of the data, or without one"
            )

    def row(self, field: Tensor, fill: float | int = 0) -> Tensor:
        """Put a field [B, S] that shared tokens agree in into the order of the row: [T], `fill` at padding.

        >>> from parallel_rl.prefix_tree import build_tree
        >>> tree = build_tree(torch.tensor([[7, 8, 1], [7, 8, 2]]), torch.tensor([3, 3]))
        >>> tree.row(tree.input_ids).tolist()
        [7, 8, 1, 2]
        """
        empty = field.new_full((self.row_length, *field.shape[2:]), fill)
        real = self.real.to(field.device)
        return empty.index_put((self.where.to(field.device)[real],), field[real])


def scored_tokens(token_mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """Return the tokens [B, S] that may carry loss as booleans on the host; ValueError for another shape."""
    if token_mask is None:
        return None
    if token_mask.shape != input_ids.shape:
        raise ValueError(f"token_mask must be [B, S] = {list(input_ids.shape)}, got {list(token_mask.shape)}")
    return token_mask.cpu().bool()


def _layout(tree: PrefixTree, cp_size: int, cp_rank: int, cp_layout: CPLayout, device: torch.device) -> SequenceLayout:
    owner, local = tree.owners(cp_size, cp_layout)
    width = tree.where.shape[1]
    owners = torch.where(tree.real, owner[tree.where], -1)
    here = (owners == cp_rank) & _read(tree)
    sequences, positions = here.nonzero().unbind(1)
    rows = local[tree.where[here]]
    count = tree.row_length // cp_size
    edges, targets, branches = _edges(tree, sequences, positions, rows, count)
    chunk = torch.nn.functional.pad(owners[:, 1:] != owners[:, :-1], (1, 0)).cumsum(1)
    chunk = torch.where(tree.real, chunk, 0)

    def move(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

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
            Groups.of(rows, count).to(device),
            edges.to(device),
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
    """Find the edges: their places, a flat token of each, and the rows of further ones."""
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
