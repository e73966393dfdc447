"""Take a tree from a host: segments of tokens and their parents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from parallel_rl.prefix_tree.tree import PrefixTree, scored_tokens

if TYPE_CHECKING:
    from torch import Tensor


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
