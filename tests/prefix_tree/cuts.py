"""The rows of a tree that a context rank holds, cut with Python lists."""

from __future__ import annotations

from itertools import pairwise

from parallel_rl import PrefixTree
from parallel_rl.layout import CPLayout


def held_rows(tree: PrefixTree, cp: int, rank: int, cp_layout: CPLayout) -> list[int]:
    """Positions in the order of the rank's logits."""
    row = list(range(tree.row_length))
    if cp_layout == "contiguous" or cp == 1:
        part = len(row) // cp
        return row[rank * part : (rank + 1) * part]
    held = []
    for first, last in pairwise(tree.bounds.tolist()):
        part = (last - first) // (2 * cp)
        chunks = [row[first + k * part : first + (k + 1) * part] for k in range(2 * cp)]
        held += chunks[rank] + chunks[2 * cp - 1 - rank]
    return held
