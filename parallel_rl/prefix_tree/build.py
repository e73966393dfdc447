"""Build a tree: find the prefixes that sequences share, or take segments and their parents from a host."""

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


def from_nodes(
    nodes: Sequence[Sequence[int] | Tensor],
    parents: Sequence[int],
    ends: Sequence[int],
    *,
    input_ids: Tensor,
    token_mask: Tensor | None = None,
    row_length: int | None = None,
) -> PrefixTree:
    """Make a tree from segments of tokens with parents, in the order of their row.

    A host that deduplicates has such segments.

    >>> ids = torch.tensor([[5, 6, 7], [5, 6, 8]])
    >>> from_nodes([[5, 6], [7], [8]], [-1, 0, 0], [1, 2], input_ids=ids).where.tolist()
    [[0, 1, 2], [0, 1, 3]]

    Args:
        nodes: the tokens of each segment, in the order of the row.
        parents: the segment before each, an earlier one; −1 for a root.
        ends: [B] the segment with which each sequence ends.
        input_ids: [B, S] the sequences.
        token_mask: see `build_tree`.
        row_length: T, if the host padded its row at the end.

    Raises:
        ValueError: an empty node, a parent that does not come earlier, a node that no sequence passes, two children of one
            node that begin with the same token, a node behind the root of a later tree, a path that is longer than S or
            disagrees with `input_ids`, a row that is too short; with its index.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(f"input_ids must be integers [B, S], got {input_ids.dtype} {list(input_ids.shape)}")
    if len(nodes) != len(parents) or len(ends) != len(input_ids) or not len(ends):
        raise ValueError(
            f"{len(nodes)} nodes, {len(parents)} parents, {len(ends)} ends and {len(input_ids)} rows of input_ids do not fit: "
            "one parent a node, one end a row"
        )
    ids, tokens = input_ids.cpu().to(torch.int64), [torch.as_tensor(node).cpu().flatten() for node in nodes]
    _check_nodes(tokens, parents, ends)
    starts = [0]
    for node in tokens:
        starts.append(starts[-1] + len(node))
    where, lengths = torch.zeros_like(ids), []
    passed: set[int] = set()
    for row, end in enumerate(ends):
        path = _path(end, parents)
        passed.update(path)
        positions = torch.cat([torch.arange(starts[node], starts[node + 1]) for node in path])
        _check_path(torch.cat([tokens[node] for node in path]), ids[row], row)
        where[row, : len(positions)] = positions
        lengths.append(len(positions))
    if unused := set(range(len(nodes))) - passed:
        raise ValueError(f"nodes[{min(unused)}] lies on the path of no sequence; leave it out of the row")
    sizes = torch.tensor(lengths)
    order = sorted(range(len(ends)), key=lambda row: (where[row, : lengths[row]].tolist(), row))
    shared = torch.zeros_like(sizes)
    for earlier, row in pairwise(order):
        least = min(lengths[earlier], lengths[row])
        shared[row] = (where[earlier, :least] == where[row, :least]).long().cumprod(0).sum()
    total = starts[-1] if row_length is None else row_length
    if total < starts[-1]:
        raise ValueError(f"row_length = {row_length} is less than the {starts[-1]} tokens of the nodes")
    roots = [starts[node] for node, parent in enumerate(parents) if parent == -1]
    bounds = torch.tensor([*roots, total])
    return PrefixTree(ids, sizes, where, torch.tensor(order), shared, bounds, scored_tokens(token_mask, ids))


def _path(end: int, parents: Sequence[int]) -> list[int]:
    path = [end]
    while parents[path[-1]] != -1:
        path.append(parents[path[-1]])
    return path[::-1]


def _check_nodes(tokens: Sequence[Tensor], parents: Sequence[int], ends: Sequence[int]) -> None:
    firsts: dict[tuple[int, int], int] = {}
    roots: list[int] = []
    for node, (segment, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not len(segment):
            raise ValueError(f"nodes[{node}] is empty; join its children to its parent")
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}] = {parent} must be an earlier node, or −1 for a root")
        roots.append(node if parent == -1 else roots[parent])
        if node and roots[node] < roots[node - 1]:
            raise ValueError(
                f"nodes[{node}] belongs to the tree of nodes[{roots[node]}], but the tree of nodes[{roots[node - 1]}] began "
                "before it; put the nodes of one tree one after the other"
            )
        twin = firsts.setdefault((parent, int(segment[0])), node)
        if twin != node and parent != -1:
            raise ValueError(
                f"nodes[{twin}] and nodes[{node}] both continue nodes[{parent}] with the token {int(segment[0])}; a token that "
                "two paths share is stored once"
            )
    for row, end in enumerate(ends):
        if not 0 <= end < len(tokens):
            raise ValueError(f"ends[{row}] = {end} must be a node, in [0, {len(tokens)})")


def _check_path(path: Tensor, ids: Tensor, row: int) -> None:
    if len(path) > len(ids):
        raise ValueError(f"the path of sequence {row} has {len(path)} tokens; input_ids[{row}] has room for {len(ids)}")
    wrong = path != ids[: len(path)]
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise ValueError(
            f"the path of sequence {row} has {int(path[token])} at token {token}; input_ids has {int(ids[token])}"
        )
