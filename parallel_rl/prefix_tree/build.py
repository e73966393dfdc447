"""Find the prefixes that sequences share: sorted rows, common prefixes of neighbours, depth-first order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from parallel_rl.prefix_tree.tree import PrefixTree, scored_tokens

if TYPE_CHECKING:
    from torch import Tensor


def build_tree(
    input_ids: Tensor,
    lengths: Tensor,
    *,
    alike: Sequence[Tensor] = (),
    token_mask: Tensor | None = None,
    multiple_of: int = 1,
) -> PrefixTree:
    """Find the prefixes that sequences share, exactly, on the host.

    The row is depth-first; children stand in the order of the first sequence that takes them. A sequence may end inside
    another, and two may be equal.

    >>> tree = build_tree(torch.tensor([[5, 6, 7, 0], [5, 6, 8, 9], [5, 0, 0, 0]]), torch.tensor([3, 4, 1]))
    >>> tree.where.tolist(), tree.tokens, tree.flat_tokens
    ([[0, 1, 2, 0], [0, 1, 3, 4], [0, 0, 0, 0]], 5, 8)

    Args:
        input_ids: [B, S] integer.
        lengths: [B] integer, at least 1 and at most S.
        alike: fields [B], [B, S] or [B, S, K] that must agree before two tokens are stored once, because they change what
            the model or the loss computes at a row position: kept token ids, a temperature of each sample, expert routes.
        token_mask: [B, S] the tokens that may carry loss: the others, such as a prompt of 16 answers, cost a loss nothing.
        multiple_of: each tree is padded to a multiple, for context or sequence parallelism (zigzag: 2·cp).

    Raises:
        ValueError: shapes, dtypes, a length outside [1, S], a multiple below 1.
    """
    _check_sequences(input_ids, lengths, multiple_of)
    ids, sizes = input_ids.cpu().to(torch.int64), lengths.cpu().to(torch.int64)
    codes = [ids.numpy()]
    for place, field in enumerate(alike):
        codes.append(_codes(field, ids.shape, f"alike[{place}]"))
    table = np.stack(codes, axis=-1)
    real = np.arange(ids.shape[1]) < sizes.numpy()[:, None]
    table = np.where(
        real[..., None], table - table.min() + 1, 0
    )  # 0 beyond the end: a prefix sorts before what continues it
    order = _depth_first(table, sizes.numpy())
    shared = np.zeros(len(order), np.int64)
    shared[order[1:]] = _common(table[order[:-1]], table[order[1:]], sizes.numpy()[order])
    where, bounds = _places(order, shared, sizes.numpy(), ids.shape[1], multiple_of)
    return PrefixTree(
        ids,
        sizes,
        torch.from_numpy(where),
        torch.from_numpy(order),
        torch.from_numpy(shared),
        torch.from_numpy(bounds),
        scored_tokens(token_mask, ids),
    )


def _codes(field: Tensor, shape: torch.Size, name: str) -> np.ndarray:
    """Number the values of a field [B], [B, S] or [B, S, K] per token: equal ones alike, [B, S]."""
    if field.shape[:1] != shape[:1] or (field.dim() > 1 and field.shape[:2] != shape) or field.dim() > 3:
        raise ValueError(
            f"{name} must be [B], [B, S] or [B, S, K] with [B, S] = {list(shape)}, got {list(field.shape)}"
        )
    values = field.detach().cpu()
    values = values.double() if values.is_floating_point() else values.to(torch.int64)
    per_token = values.numpy().reshape(*values.shape[:2], -1)
    if values.dim() == 1:
        per_token = np.repeat(per_token.reshape(-1, 1, 1), shape[1], axis=1)
    _, codes = np.unique(per_token.reshape(shape.numel(), -1), axis=0, return_inverse=True)
    return codes.reshape(shape)


def _depth_first(table: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Order the sequences depth-first; branches go by the first sequence that takes each."""
    keys = [row.astype(">i8").tobytes() for row in table]
    ranked = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    common = _common(table[ranked[:-1]], table[ranked[1:]], sizes[ranked])
    order: list[int] = []
    groups = [(0, len(ranked))]  # of neighbours in `ranked`, the next one last
    while groups:
        first, last = groups.pop()
        if last - first == 1:
            order.append(int(ranked[first]))
            continue
        inner = common[first : last - 1]
        cuts = first + 1 + np.flatnonzero(inner == inner.min())
        parts = list(pairwise([first, *cuts.tolist(), last]))
        groups.extend(sorted(parts, key=lambda part: -int(ranked[part[0] : part[1]].min())))
    return np.array(order, np.int64)


def _common(left: np.ndarray, right: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Count the leading tokens that neighbours of [B] sequences share: [B − 1]."""
    equal = (left == right).all(-1)
    count = np.where(equal.all(1), equal.shape[1], equal.argmin(1))
    return np.minimum(count, np.minimum(sizes[:-1], sizes[1:]))


def _places(
    order: np.ndarray, shared: np.ndarray, sizes: np.ndarray, width: int, multiple_of: int
) -> tuple[np.ndarray, np.ndarray]:
    """Place the tokens in the row: `where` [B, S] and `bounds` [trees + 1]."""
    added = (sizes - shared)[order]
    roots = np.flatnonzero(shared[order] == 0)
    room = np.add.reduceat(added, roots)
    room = -(-room // multiple_of) * multiple_of
    bounds = np.concatenate([[0], room.cumsum()])
    starts = added.cumsum() - added  # without the padding of the trees before
    tree = np.searchsorted(roots, np.arange(len(order)), side="right") - 1
    starts = starts - starts[roots][tree] + bounds[tree]
    columns = np.arange(width)
    rows = np.arange(len(order))[:, None]
    owner = np.maximum.accumulate(np.where(shared[order][:, None] <= columns, rows, 0), axis=0)
    places = starts[owner] + columns - shared[order][owner]
    where = np.empty((len(order), width), np.int64)
    where[order] = np.where(columns < sizes[order][:, None], places, 0)
    return where, bounds


def _check_sequences(input_ids: Tensor, lengths: Tensor, multiple_of: int) -> None:
    if input_ids.dim() != 2 or input_ids.is_floating_point() or not input_ids.numel():
        raise ValueError(f"input_ids must be integers [B, S], not empty; got {input_ids.dtype} {list(input_ids.shape)}")
    if lengths.shape != input_ids.shape[:1] or lengths.is_floating_point():
        raise ValueError(
            f"lengths must be integers [B] = [{len(input_ids)}], got {lengths.dtype} {list(lengths.shape)}"
        )
    wrong = (lengths < 1) | (lengths > input_ids.shape[1])
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(f"lengths[{row}] = {int(lengths[row])} must lie in [1, S = {input_ids.shape[1]}]")
    if multiple_of < 1:
        raise ValueError(f"multiple_of = {multiple_of} must be at least 1")
