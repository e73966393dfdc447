"""The records of one source in an order fixed by the seed, with a window of records in memory.

Blocks are permuted, then cut into windows of a given size in bytes; within a window all records are permuted. A reader
holds one window. A source smaller than a window is permuted as a whole, by its number of records alone, so its order does
not depend on how it is split into files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Generic, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from parallel_rl.agreement import gather_results
from parallel_rl.groups import group_rank, group_size
from parallel_rl.training.data.format import UnfitRecord
from parallel_rl.training.data.records.files import Block, DataFile, Entries, entries, fingerprint, stretch

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def permutation(count: int, *key: int) -> NDArray[np.int64]:
    """Return a permutation of range(count) that depends on `key` alone, not on machine or numpy version."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state + np.uint64((part + 1) * _GOLDEN & _MASK))
    keys = _mix(state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return np.argsort(keys, kind="stable")


class Order:
    """Endless passes over the records of `index`, each permuted by `seed` in windows of `window` bytes."""

    def __init__(self, index: Entries, window: int, seed: int) -> None:
        self._index, self._window, self._seed = index, window, seed
        self.size = int(index["count"].sum())
        self._pass = lru_cache(maxsize=2)(self._make_pass)
        self._inner = lru_cache(maxsize=2)(self._make_inner)

    def locate(self, number: int) -> tuple[int, int]:
        """Return the block of record `number` of the endless stream, and the place in it."""
        turn, place = divmod(number, self.size)
        blocks, ends, starts = self._pass(turn)
        window = int(np.searchsorted(starts, place, side="right")) - 1
        first = int(starts[window])
        place = first + int(self._inner(turn, window)[place - first])
        at = int(np.searchsorted(ends, place, side="right"))
        block = int(blocks[at])
        return block, place - int(ends[at]) + int(self._index["count"][block])

    def _make_pass(self, turn: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the blocks in order, the place where each ends, and the places where windows start."""
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
    """Apply SplitMix64's finaliser (Steele, Lea, Flood 2014), a bijection of 64 bits."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
    return state ^ (state >> np.uint64(31))


RecordT = TypeVar("RecordT")

AT_ONCE = 1024  # records that `batches` holds


class Records(Generic[RecordT]):
    """The rows of `files` as `parse` returns them, read on demand.

    `records[place]` counts in the order of the files; `stream` shuffles. Above `window` bytes and one block, the least
    recently used block is dropped. `index` has the blocks of all files, in order. `left_out` has, by block, the
    ascending rows that are no records. A ValueError of `parse` gets the file and the line.
    """

    def __init__(
        self,
        files: Sequence[DataFile] = (),
        index: Entries | None = None,
        parse: Callable[[Mapping[str, object]], RecordT] | None = None,
        window: int = 1 << 26,
        left_out: Mapping[int, NDArray[np.int64]] | None = None,
    ) -> None:
        self.files, self.window = files, window
        self.index = entries([]) if index is None else index.copy()
        self._rows, self._left_out = self.index["count"].copy(), left_out or {}
        for block, rows in self._left_out.items():
            self.index["count"][block] -= len(rows)
        self._parse = parse
        self._ends = np.cumsum(self.index["count"])
        self._limit = window + int(self.index["size"].max(initial=0))
        self._held: OrderedDict[int, Block] = OrderedDict()
        self._bytes = 0
        self._order = lru_cache(maxsize=2)(lambda seed: Order(self.index, window, seed))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, place: int) -> RecordT:
        if not 0 <= place < len(self):
            raise IndexError(f"record {place} of {len(self)}")
        block = int(np.searchsorted(self._ends, place, side="right"))
        return self._record(block, place - self.first_of(block))

    def stream(self, indices: Sequence[int], seed: int) -> list[RecordT]:
        """Return records of the endless stream; each shuffled pass, fixed by the seed, has each record once.

        ValueError if `parse` refuses a row, or a file has changed since it was indexed.
        """
        order = self._order(seed)
        return [self._record(*order.locate(index)) for index in indices]

    def batches(
        self, block: int, unfit: Callable[[int, int, UnfitRecord], None] | None = None
    ) -> Iterator[tuple[int, list[RecordT]]]:
        """Iterate over (place of the first, records) of a block, some at a time.

        `unfit` gets (block, row, error) of a record that does not fit, and leaves it out; None: the error is raised.
        """
        place, held, gone = self.first_of(block), self._block(block), {*self._left_out.get(block, ())}
        for start in range(0, int(self._rows[block]), AT_ONCE):
            stop = min(start + AT_ONCE, int(self._rows[block]))
            rows, batch = held.rows(start, stop), list[RecordT]()
            for number in range(start, stop):
                if number in gone:
                    next(rows)
                    continue
                try:
                    batch.append(self._parsed(block, number, partial(next, rows)))
                except UnfitRecord as error:
                    if unfit is None:
                        raise
                    unfit(block, number, error)
            yield place, batch
            place += len(batch)

    def first_of(self, block: int) -> int:
        return int(self._ends[block]) - int(self.index["count"][block])

    def name_of(self, place: int) -> str:
        """Return the file and line of a record, for messages."""
        block = int(np.searchsorted(self._ends, place, side="right"))
        return self._name(block, self._row(block, place - self.first_of(block)))

    @property
    def bytes(self) -> int:
        """Return the size of all files (Parquet: uncompressed)."""
        return int(self.index["size"].sum())

    @property
    def fingerprint(self) -> str:
        """Return a hash of the records and their order."""
        gone = [number for block in sorted(self._left_out) for number in (block, *self._left_out[block].tolist())]
        return fingerprint([*(file.size for file in self.files), *gone], self.index, self.window)

    def without(self, rows: Iterable[tuple[int, int]]) -> Records[RecordT]:
        """Return the records without rows (block, row); `self` must have left none out."""
        gone: dict[int, list[int]] = {}
        for block, row in sorted(rows):
            gone.setdefault(block, []).append(row)
        index = self.index.copy()
        index["count"] = self._rows
        return Records(
            self.files, index, self._parse, self.window, {block: np.array(mine) for block, mine in gone.items()}
        )

    def _row(self, block: int, place: int) -> int:
        gone = self._left_out.get(block)
        if gone is None:
            return place
        return place + int(np.searchsorted(gone - np.arange(len(gone)), place, side="right"))

    def _record(self, block: int, place: int) -> RecordT:
        row = self._row(block, place)
        return self._parsed(block, row, partial(self._block(block).row, row))

    def _parsed(self, block: int, place: int, row: Callable[[], Mapping[str, object]]) -> RecordT:
        assert self._parse is not None
        try:
            return self._parse(row())
        except UnfitRecord as error:
            raise UnfitRecord(f"{self._name(block, place)}: {error}", error.kind, error.tokens) from None
        except ValueError as error:
            raise ValueError(f"{self._name(block, place)}: {error}") from None

    def _name(self, block: int, place: int) -> str:
        file = self.files[self.index["file"][block]]
        before = self._rows[np.searchsorted(self.index["file"], self.index["file"][block]) : block].sum()
        return f"{file.path}, {file.word} {int(before) + place + 1}"

    def _block(self, block: int) -> Block:
        if block in self._held:
            self._held.move_to_end(block)
            return self._held[block]
        file, start, size, _, crc = self.index[block].item()
        while self._held and self._bytes + size > self._limit:
            gone, _ = self._held.popitem(last=False)
            self._bytes -= int(self.index["size"][gone])
        held = self._held[block] = self.files[file].read(start, size, crc)
        self._bytes += size
        return held


def index_of(files: Sequence[DataFile], name: str) -> Entries:
    """Return the index of all files, equal on every rank; each rank reads a part.

    ValueError on every rank if a file is empty, damaged, or differs between ranks.
    """
    rank, size = group_rank(dist.group.WORLD), group_size(dist.group.WORLD)
    parts = gather_results(lambda: (_facts(files), _part(files, rank, size)))
    for other, (facts, _) in enumerate(parts):
        if facts != parts[0][0]:
            path, size = min({*facts} ^ {*parts[0][0]})
            raise ValueError(f"{name} differs between the ranks {other} and 0: only one sees {path} with {size} bytes")
    index = np.concatenate([part for _, part in parts])
    if len(index) and not index["count"].sum():
        raise ValueError(f"{name}: data.map leaves no record")
    filled = set(index["file"].tolist())
    for number, file in enumerate(files):
        if number not in filled:
            raise ValueError(f"the data file {file.path.absolute()} is empty; at least one {file.word} is needed")
    return index


def _facts(files: Sequence[DataFile]) -> list[tuple[str, int]]:
    return [(str(file.path), file.size) for file in files]


def _part(files: Sequence[DataFile], rank: int, size: int) -> Entries:
    """Return this rank's part of the stretches of all files."""
    step = stretch(sum(file.size for file in files))
    units = [file.units(step) for file in files]
    low, high = (edge * sum(units) // size for edge in (rank, rank + 1))
    parts, before = [entries([])], 0
    for number, (file, count) in enumerate(zip(files, units, strict=True)):
        first, last = max(low - before, 0), min(high - before, count)
        if first < last:
            parts.append(file.index(number, first, last, step))
        before += count
    return np.concatenate(parts)
