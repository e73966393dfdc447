"""Pack rows that hold each shared prefix once: which sequences share a row, and its tokens.

Legend: a *unit* is `together` sequences that stay in one micro-batch, a *group* neighbouring units with the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.experience.samples import Samples
from parallel_rl.megatron import tree_batch
from parallel_rl.prefix_tree import build_tree
from parallel_rl.training.batching.bin_packing import Capacity, first_fit_decreasing
from parallel_rl.training.batching.micro_batches import MicroBatch, fit

ScoredTokens = Callable[[Mapping[str, Tensor]], Tensor]


class _Part(NamedTuple):
    """Units that share a row, and their tokens in it."""

    units: list[int]
    tokens: int


def pack_trees(rows: Samples, capacity: Capacity, together: int = 1) -> list[list[int]]:
    """Pack sequences into micro-batches by the tokens of their trees; return the indices in each.

    Branches are joined from the leaves up. Sequences with a prefix share a row if they fit. Otherwise first-fit decreasing
    splits them into parts, and each part repeats the prefix.

    >>> ids = torch.tensor([[7, 7, 7, row] for row in range(4)])
    >>> rows = Samples(ids, torch.ones_like(ids), torch.full((4,), 4))
    >>> pack_trees(rows, Capacity(8)), pack_trees(rows, Capacity(5))  # 16 tokens, of which 7 differ
    ([[0, 1, 2, 3]], [[0, 1], [2, 3]])

    Raises:
        ValueError: the tree of a unit is longer than a row, or the sequences do not fill whole units.
    """
    if len(rows) % together:
        raise ValueError(f"{len(rows)} sequences do not make whole units of {together}")
    if not len(rows):
        return []
    sizes = _unit_sizes(rows, capacity.sequence, together)
    capacity.check([capacity.padded(size) for size in sizes], rows.lengths.tolist())
    firsts = build_tree(rows.input_ids[::together], rows.lengths[::together])
    shared = firsts.shared.tolist()
    open_branches: list[tuple[int, list[_Part]]] = [(0, [])]  # their prefixes' lengths, and the parts behind each
    last: list[_Part] = []
    for unit in firsts.order.tolist():
        last = _close(open_branches, last, shared[unit], capacity)
        if open_branches[-1][0] < shared[unit]:
            open_branches.append((shared[unit], []))
        open_branches[-1][1].extend(last)
        last = [_Part([unit], sizes[unit])]
    trees = [*open_branches[0][1], *_close(open_branches, last, 0, capacity)]
    bins = first_fit_decreasing([capacity.padded(tree.tokens) for tree in trees], capacity.usable)
    units = [sorted(unit for place in places for unit in trees[place].units) for places in bins]
    return [[unit * together + place for unit in of_bin for place in range(together)] for of_bin in units]


def tree_micro_batches(
    rows: Samples, bins: Sequence[list[int]], *, device: torch.device, scored: ScoredTokens | None = None
) -> list[MicroBatch]:
    """Make micro-batches of the indices in `bins`, each a row of prefix trees.

    Args:
        scored: finds the tokens [B, S] that may have loss, added to those of token_mask.

    Raises:
        ValueError: from the layout, where lengths do not fit.
    """
    return [
        replace(_micro_batch(rows.select(indices), indices, device, scored), groups_cut=cut, tokens_repeated=repeated)
        for indices, (cut, repeated) in zip(bins, cut_groups(rows, bins), strict=True)
    ]


def cut_groups(rows: Samples, bins: Sequence[list[int]]) -> list[tuple[int, int]]:
    """Count the groups that are cut into several micro-batches, and the tokens that their parts repeat.

    A group counts in the last of its micro-batches.

    >>> ids = torch.tensor([[7, 7, 7, row] for row in range(4)])
    >>> rows = Samples(ids, ids < 7, torch.full((4,), 4))
    >>> cut_groups(rows, [[0, 1], [2, 3]])  # the prompt of three tokens stands in both
    [(0, 0), (1, 3)]
    """
    counts = [[0, 0] for _ in bins]
    if len(bins) > 1:
        group = (_begins(rows).cumsum(0) - 1).tolist()
        parts: dict[int, dict[int, list[int]]] = {}
        for number, places in enumerate(bins):
            for place in places:
                parts.setdefault(group[place], {}).setdefault(number, []).append(place)
        for of_group in parts.values():
            if len(of_group) > 1:
                last = counts[max(of_group)]
                last[0] += 1
                last[1] += sum(tree_tokens(rows.select(part)) for part in of_group.values())
                last[1] -= tree_tokens(rows.select([place for part in of_group.values() for place in part]))
    return [(cut, repeated) for cut, repeated in counts]


def group_tokens(rows: Samples, parts: int = 1, together: int = 1) -> Tensor:
    """Count the tree's tokens [N] of each group at its first sequence; 0 at the group's other sequences.

    Args:
        parts: equal parts of the rows; no group crosses their bounds.
    """
    if not len(rows):
        return rows.lengths
    begins = _begins(rows, together)
    begins |= torch.arange(len(rows)) % max(len(rows) // parts, 1) == 0
    tokens = _tokens_by(rows, begins.cumsum(0) - 1)
    counted = torch.zeros_like(rows.lengths)
    counted[begins] = tokens
    return counted


def unit_rooms(rows: Samples, capacity: Capacity, together: int = 1) -> Tensor:
    """Count the room [N] that the tree of each unit takes at its first sequence; 0 at the others."""
    rooms = torch.zeros_like(rows.lengths)
    if len(rows):
        sizes = _unit_sizes(rows, capacity.sequence, together)
        rooms[::together] = torch.tensor([capacity.padded(size) for size in sizes])
    return rooms


def every_token(data: Mapping[str, Tensor]) -> Tensor:
    """Mark every token [B, S] as scored: a critic has a value for each."""
    return torch.ones_like(data["token_mask"], dtype=torch.bool)


def tree_tokens(rows: Samples) -> int:
    """Count the tokens of the rows' trees."""
    return build_tree(rows.input_ids, rows.lengths).tokens if len(rows) else 0


def _begins(rows: Samples, together: int = 1) -> Tensor:
    """Mark [N] the sequences at which a group begins."""
    columns = torch.arange(rows.input_ids.shape[1])
    trained = rows.token_mask.bool() & (columns < rows.lengths[:, None])
    prompt = torch.where(trained.any(1), trained.int().argmax(1), rows.lengths)
    prompts = torch.where(columns < prompt[:, None], rows.input_ids, -1)
    begins = torch.arange(len(rows)) % together == 0
    begins[together:] &= (prompts[together:] != prompts[:-together]).any(1)
    return begins


def _close(branches: list[tuple[int, list[_Part]]], last: list[_Part], depth: int, capacity: Capacity) -> list[_Part]:
    """Join the parts of branches deeper than `depth`; return the parts of the last branch."""
    while branches[-1][0] > depth:
        prefix, parts = branches.pop()
        parts += last
        bins = first_fit_decreasing([part.tokens - prefix for part in parts], max(capacity.usable - prefix, 1))
        last = [
            _Part(
                [unit for place in places for unit in parts[place].units],
                prefix + sum(parts[place].tokens - prefix for place in places),
            )
            for places in bins
        ]
    return last


def _unit_sizes(rows: Samples, multiple: int, together: int) -> list[int]:
    """Count the tokens of each unit alone; the trees behind a unit's first are padded to `multiple`."""
    if together == 1:
        return rows.lengths.tolist()
    unit = torch.arange(len(rows)) // together
    tree = build_tree(rows.input_ids, rows.lengths, alike=[unit], multiple_of=multiple)
    of_row = torch.searchsorted(tree.bounds, tree.where[:, 0].contiguous(), right=True) - 1
    trees = len(tree.bounds) - 1
    tokens = torch.zeros(trees, dtype=torch.int64).index_add_(0, of_row, tree.lengths - tree.shared)
    unit_of_tree = torch.zeros(trees, dtype=torch.int64).index_put_((of_row,), unit)
    main = of_row[::together]
    further = tree.bounds.diff()
    further[main] = tokens[main]
    return torch.zeros(len(main), dtype=torch.int64).index_add_(0, unit_of_tree, further).tolist()


def _tokens_by(rows: Samples, group: Tensor) -> Tensor:
    """Count the tree's tokens of each group [N] of rows."""
    tree = build_tree(rows.input_ids, rows.lengths, alike=[group])
    return torch.zeros(int(group[-1]) + 1, dtype=torch.int64).index_add_(0, group, tree.lengths - tree.shared)


def _micro_batch(rows: Samples, indices: list[int], device: torch.device, scored: ScoredTokens | None) -> MicroBatch:
    width = int(rows.lengths.max())
    data = {name: fit(field, width) if field.dim() == 2 else field for name, field in rows.data().items()}
    read = None if scored is None else scored(data).bool() | data["token_mask"].bool()
    batch = tree_batch(data, rows.lengths, scored=read, device=device)
    tokens = int(rows.lengths.sum())
    return MicroBatch(batch.input, batch.data, None, batch.carries, indices=indices, tokens=tokens)
