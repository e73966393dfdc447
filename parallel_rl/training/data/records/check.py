"""Check every record before a run, each rank a part, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from parallel_rl.agreement import gather_results
from parallel_rl.groups import group_rank, group_size
from parallel_rl.training.data.format import UnfitRecord
from parallel_rl.training.data.records.index import Entries
from parallel_rl.training.data.records.source import Records

RecordT = TypeVar("RecordT")


def check(
    records: Records[RecordT],
    length: Callable[[RecordT], int],
    budget: float = float("inf"),
    each: Callable[[int, Sequence[RecordT]], None] = lambda place, batch: None,
    unfit: Callable[[int, int, UnfitRecord], None] | None = None,
) -> tuple[int, float]:
    """Parse blocks of `budget` bytes, at least one; return the greatest length and the checked fraction.

    The blocks are spread evenly over the source and split over the ranks; result and ValueError are the same on each.
    `length` counts the tokens of a record. `each` gets (place of the first, records) of this rank's part, batch by
    batch, and may refuse them; `unfit` is that of `Records.batches`.
    """
    blocks, world = spread_blocks(records.index, budget), dist.group.WORLD

    def work() -> int:
        longest = 0
        for block in _share(records.index, blocks, group_rank(world), group_size(world)).tolist():
            for place, batch in records.batches(block, unfit):
                longest = max(longest, max(map(length, batch), default=0))
                each(place, batch)
        return longest

    longest = max(gather_results(work))
    return longest, int(records.index["size"][blocks].sum()) / max(records.bytes, 1)


def spread_blocks(index: Entries, budget: float) -> NDArray[np.int64]:
    """Return an even sample of blocks with about `budget` bytes, or all blocks."""
    total, count = int(index["size"].sum()), len(index)
    if total <= budget:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, max(1, int(count * budget / total))).astype(np.int64))


class TextSet:
    """Set of texts, eight bytes each; two texts collide with a probability of 2⁻⁶⁴."""

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self._keys = np.sort(keys)

    def __contains__(self, text: str) -> bool:
        key = np.uint64(_key(text))
        at = int(self._keys.searchsorted(key))
        return at < len(self._keys) and bool(self._keys[at] == key)


def keys_of(texts: Iterable[str]) -> NDArray[np.uint64]:
    return np.fromiter(map(_key, texts), np.uint64)


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _share(index: Entries, blocks: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
    """Return this rank's consecutive part of `blocks`, about as many bytes as any other's."""
    sizes = index["size"][blocks]
    middle = np.cumsum(sizes) - sizes / 2
    owner = np.minimum(middle * size // max(int(sizes.sum()), 1), size - 1)
    return blocks[owner == rank]
