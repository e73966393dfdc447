"""Distribute rows over data ranks and micro-batches from their lengths alone, and move them there."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.experience.samples import SamplesT
from parallel_rl.groups import all_gather, group_rank, group_size
from parallel_rl.training.batching.micro_batches import fit
from parallel_rl.training.config.sections import BatchConfig, ParallelConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


def balance(
    rows: SamplesT,
    capacity: Capacity,
    group: ProcessGroup | None,
    device: torch.device,
    *,
    parts: int = 1,
    together: int = 1,
    loads: Sequence[int] = (),
    weights: Tensor | None = None,
    rooms: Tensor | None = None,
) -> tuple[SamplesT, list[int]]:
    """Even out the tokens of all data ranks; return this rank's rows, and the number in each part.

    The assignment depends on lengths alone. Each part, an optimizer step, is balanced separately.

    Args:
        rows: this rank's; every rank has the same fields.
        capacity: of a micro-batch, which every unit must fit.
        group, device: the data ranks, and where they communicate.
        parts: equal, consecutive parts of this rank's rows.
        together: consecutive rows that stay together, as a unit.
        loads: tokens that this rank already has in each part; empty: none.
        weights: [N] tokens of rows that move as one, at the first of them, 0 at the others; None: each unit's sum of
            lengths.
        rooms: [N] room of each unit at its first row, if its sequences share prefixes; None: its padded lengths.

    Raises:
        ValueError: on every rank: a unit is longer than a micro-batch, or rows do not fill whole units in each part.
    """
    size, rank = group_size(group), group_rank(group)
    facts = torch.tensor([len(rows), rows.input_ids.shape[1], *(loads or [0] * parts)], device=device)
    of_ranks: list[list[int]] = all_gather(facts, group).tolist()
    counts = [fact[0] for fact in of_ranks]
    lengths = _gathered(rows.lengths, counts, group, device)
    rooms_of_ranks = None if rooms is None else _gathered(rooms, counts, group, device)
    _check_units(lengths, rooms_of_ranks, capacity, parts, together)
    if weights is None:
        of_units = [_unit_tokens(of_rank, together) for of_rank in lengths]
    else:
        of_units = _gathered(weights, counts, group, device)
    owners = _owners(of_units, [fact[2:] for fact in of_ranks], parts)
    if size > 1:
        rows = _exchange(rows, owners, max(fact[1] for fact in of_ranks), rank, group, device)
    # the part of each received row, in the order of the ranks
    part = torch.cat([_parts(len(owner), parts)[owner == rank] for owner in owners])
    return rows.select(part.argsort(stable=True).tolist()), part.bincount(minlength=parts).tolist()


def _gathered(
    field: Tensor, counts: Sequence[int], group: ProcessGroup | None, device: torch.device
) -> list[list[int]]:
    """Gather an integer of each row from every rank; `counts` has the ranks' numbers of rows."""
    mine = torch.nn.functional.pad(field, (0, max(counts) - len(field))).to(device)
    gathered: list[list[int]] = all_gather(mine, group).tolist()
    return [every[:count] for every, count in zip(gathered, counts, strict=True)]


def _check_units(
    lengths: list[list[int]], rooms: list[list[int]] | None, capacity: Capacity, parts: int, together: int
) -> None:
    for rank, of_rank in enumerate(lengths):
        if len(of_rank) % (parts * together):
            raise ValueError(f"data rank {rank} has {len(of_rank)} rows; {parts} parts need whole units of {together}")
        if rooms is None:
            capacity.rooms(of_rank, together)
        else:
            capacity.check(rooms[rank][::together], of_rank)


def _unit_tokens(lengths: list[int], together: int) -> list[int]:
    return [sum(lengths[row : row + together]) if row % together == 0 else 0 for row in range(len(lengths))]


def _owners(weights: list[list[int]], loads: list[list[int]], parts: int) -> list[Tensor]:
    owners = [torch.zeros(len(of_rank), dtype=torch.int64) for of_rank in weights]
    for part in range(parts):
        runs = _runs(weights, part, parts)
        dealt = deal([run.weight for run in runs], len(weights), [of_rank[part] for of_rank in loads])
        for run, owner in zip(runs, dealt, strict=True):
            owners[run.rank][run.first : run.stop] = owner
    return owners


class _Run(NamedTuple):
    """Consecutive rows of a rank that move as one."""

    rank: int
    first: int
    stop: int
    weight: int


def _runs(weights: list[list[int]], part: int, parts: int) -> list[_Run]:
    """List the runs of a part: a row with a weight, and the rows without one after it."""
    runs = []
    for rank, of_rank in enumerate(weights):
        size = len(of_rank) // parts
        rows = range(part * size, (part + 1) * size)
        firsts = [row for row in rows if of_rank[row]]
        runs += [_Run(rank, first, stop, of_rank[first]) for first, stop in pairwise([*firsts, rows.stop])]
    return runs


def _parts(count: int, parts: int) -> Tensor:
    return torch.arange(parts).repeat_interleave(count // parts)


def _exchange(
    rows: SamplesT, owners: Sequence[Tensor], width: int, rank: int, group: ProcessGroup | None, device: torch.device
) -> SamplesT:
    """Return this rank's new rows, by source rank and index; one all-to-all of bytes."""
    columns = {name: fit(field, width) if field.dim() == 2 else field for name, field in rows.tensors().items()}
    record = torch.cat([_bytes(field) for field in columns.values()], 1)
    order = owners[rank].argsort(stable=True)
    leave = owners[rank].bincount(minlength=len(owners)).tolist()
    come = [int((owner == rank).sum()) for owner in owners]
    received = record.new_empty(sum(come), record.shape[1], device=device)
    dist.all_to_all_single(received, record[order].to(device), come, leave, group=group)
    fields, at = {}, 0
    for name, field in columns.items():
        size = _bytes(field[:0]).shape[1]
        fields[name] = _from_bytes(received[:, at : at + size].cpu(), field)
        at += size
    return rows.with_fields(**fields)


def _bytes(field: Tensor) -> Tensor:
    table = field if field.dim() == 2 else field[:, None]
    return table.contiguous().view(torch.uint8)


def _from_bytes(data: Tensor, like: Tensor) -> Tensor:
    table = data.contiguous().view(like.dtype)
    return table if like.dim() == 2 else table[:, 0]
