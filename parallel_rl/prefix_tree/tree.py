"""The tree itself: the row position of each flat token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Sequences in one row that holds each shared prefix once; made by `build_tree` or `from_nodes`.

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
    """Return the tokens [B, S] that may carry loss as booleans on the host.

    Raises:
        ValueError: a mask of another shape.
    """
    if token_mask is None:
        return None
    if token_mask.shape != input_ids.shape:
        raise ValueError(f"token_mask must be [B, S] = {list(input_ids.shape)}, got {list(token_mask.shape)}")
    return token_mask.cpu().bool()
