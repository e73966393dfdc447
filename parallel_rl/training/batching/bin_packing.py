"""Assign sequences to data ranks and micro-batches from their lengths alone, equally on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from parallel_rl.training.config.sections import BatchConfig, ParallelConfig


@dataclass(frozen=True)
class Capacity:
    """Capacity of a packed micro-batch; ValueError if `tokens` is less than one `row`.

    Attributes:
        tokens: of the whole row, padding included.
        sequence: divides each padded length.
        row: divides the length of the row.
    """

    tokens: int
    sequence: int = 1
    row: int = 1

    def __post_init__(self) -> None:
        if self.tokens < self.row:
            raise ValueError(
                f"batch.tokens = {self.tokens} must be at least {self.row}: a packed row is a multiple of it"
            )

    @classmethod
    def of_layout(cls, tokens: int, *, tensor: int, context: int) -> Capacity:
        """Build a layout's capacity: 2·cp zigzag chunks a sequence, rows in multiples of 2·cp·tp (cp = 1: tp)."""
        chunks = 2 * context if context > 1 else 1
        return cls(tokens, chunks, chunks * tensor)

    @classmethod
    def of_config(cls, batch: BatchConfig, parallel: ParallelConfig) -> Capacity | None:
        """Return the capacity that `batch.tokens` sets; None if micro-batches hold a number of sequences."""
        if batch.tokens is None:
            return None
        return cls.of_layout(batch.tokens, tensor=parallel.tensor, context=parallel.context)

    @property
    def usable(self) -> int:
        """Return the longest row that is a multiple of `row`."""
        return self.tokens // self.row * self.row

    def padded(self, length: int) -> int:
        return -(-length // self.sequence) * self.sequence

    def rooms(self, lengths: Sequence[int], together: int = 1) -> list[int]:
        """Return the padded length of each unit of `together` sequences; ValueError as in `check`."""
        rooms = [sum(unit) for unit in _units([self.padded(length) for length in lengths], together)]
        self.check(rooms, lengths)
        return rooms

    def check(self, rooms: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise ValueError if a unit's room exceeds the row; the message has its sequences' lengths."""
        together = len(lengths) // max(len(rooms), 1)
        for unit, room in enumerate(rooms):
            if room > self.usable:
                rows = range(unit * together, (unit + 1) * together)
                once = "" if room == sum(self.padded(lengths[row]) for row in rows) else ", shared prefixes once"
                which = (
                    f"sequence {rows[0]}"
                    if together == 1
                    else f"sequences {rows[0]} to {rows[-1]}, which stay together,"
                )
                of = " + ".join(str(lengths[row]) for row in rows)
                raise ValueError(
                    f"{which} of {of} tokens take {room} with padding to multiples of {self.sequence}{once}; "
                    f"batch.tokens = {self.tokens} holds {self.usable} in a micro-batch; raise it"
                )


def pack(lengths: Sequence[int], capacity: Capacity, together: int = 1) -> list[list[int]]:
    """Pack whole units into micro-batches by first-fit decreasing; return the indices of their sequences.

    The largest unit goes first (of equals the first), each into the first micro-batch with room for it. That needs at
    most 11/9 of the fewest micro-batches + 6/9 (Dósa 2007), in O(n log n). A unit is `together` sequences, such as a
    pair. ValueError for a unit longer than a micro-batch, or sequences that do not fill whole units.
    """
    bins = first_fit_decreasing(capacity.rooms(lengths, together), capacity.usable)
    return [[unit * together + place for unit in units for place in range(together)] for units in bins]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of ascending indices, each with a sum of at most `capacity`."""
    if not sizes:
        return []
    # First fit leaves at most one bin half empty, which bounds their number.
    most = min(len(sizes), 2 * sum(sizes) // capacity + 1)
    leaves = 1 << (most - 1).bit_length()
    room = [capacity] * (2 * leaves)  # a tree: each node has the most room of its bins
    bins: list[list[int]] = [[] for _ in range(leaves)]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        size, node = sizes[place], 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        bins[node - leaves].append(place)
        room[node] -= size
        while node > 1:
            node //= 2
            first, second = room[2 * node], room[2 * node + 1]
            most_of_both = first if first >= second else second
            if room[node] == most_of_both:
                break
            room[node] = most_of_both
    return [sorted(indices) for indices in bins if indices]


def deal(weights: Sequence[int], ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """Assign weights to ranks with nearly even sums: the largest weight left goes to the rank with least.

    The largest sum is at most (4/3 − 1/(3·ranks)) of the least possible (Graham 1969), and exceeds the smallest by one
    weight at most. Ties go to the first weight and the first rank. With as many weights as ranks and no loads, every
    rank gets one. `loads` are positive weights that the ranks already have.
    """
    owners = [0] * len(weights)
    heap = [(load, rank) for rank, load in enumerate(loads or [0] * ranks)]
    heapq.heapify(heap)
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        load, rank = heap[0]
        owners[place] = rank
        heapq.heapreplace(heap, (load + weights[place], rank))
    return owners


def _units(values: Sequence[int], together: int) -> list[Sequence[int]]:
    if len(values) % together:
        raise ValueError(f"{len(values)} sequences do not make whole units of {together}")
    return [values[first : first + together] for first in range(0, len(values), together)]
