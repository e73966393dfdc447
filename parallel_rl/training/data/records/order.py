"""The order of a pass as a function of (seed, pass, place): nothing of it is drawn, so nothing of it need be kept.

Blocks are permuted, then cut into windows of so many bytes; within a window all records are permuted. Whoever reads in order
holds one window. A source that is smaller than a window is permuted as a whole, by its number of records alone: the order
stays when it is cut into other files.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from parallel_rl.training.data.records.index import Entries

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def permutation(count: int, *key: int) -> NDArray[np.int64]:
    """A permutation of range(count), the same for the same key on every machine and with every version of numpy."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state + np.uint64((part + 1) * _GOLDEN & _MASK))
    keys = _mix(state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return np.argsort(keys, kind="stable")


class Order:
    """Endless passes over the records of `index`, each with its own permutation.

    Args:
        index: of the source's blocks.
        window: bytes; more than that by one block at most are needed at a time.
        seed: of all passes.
    """

    def __init__(self, index: Entries, window: int, seed: int) -> None:
        self._index, self._window, self._seed = index, window, seed
        self.size = int(index["count"].sum())
        self._pass = lru_cache(maxsize=2)(self._make_pass)
        self._inner = lru_cache(maxsize=2)(self._make_inner)

    def locate(self, number: int) -> tuple[int, int]:
        """Block, and place in it, of record `number` of the endless stream."""
        turn, place = divmod(number, self.size)
        blocks, ends, starts = self._pass(turn)
        window = int(np.searchsorted(starts, place, side="right")) - 1
        first = int(starts[window])
        place = first + int(self._inner(turn, window)[place - first])
        at = int(np.searchsorted(ends, place, side="right"))
        block = int(blocks[at])
        return block, place - int(ends[at]) + int(self._index["count"][block])

    def _make_pass(self, turn: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The blocks in order, the places at which each ends, and the places at which the windows start."""
        if int(self._index["size"].sum()) <= self._window:  # then the order does not depend on how files are cut
            blocks = np.arange(len(self._index))
        else:
            blocks = permutation(len(self._index), self._seed, turn, 0)
        ends = np.cumsum(self._index["count"][blocks])
        sizes = self._index["size"][blocks]
        windows = (np.cumsum(sizes) - sizes) // self._window
        opens = np.flatnonzero(np.diff(windows, prepend=-1))
        return blocks, ends, np.concatenate([[0], ends])[opens]

    def _make_inner(self, turn: int, window: int) -> NDArray[np.int64]:
        _, _, starts = self._pass(turn)
        last = int(starts[window + 1]) if window + 1 < len(starts) else self.size
        return permutation(last - int(starts[window]), self._seed, turn, 1, window)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64 bits that leaves no pattern of its input."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
    return state ^ (state >> np.uint64(31))
