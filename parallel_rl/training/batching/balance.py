"""Move rows between data ranks until each rank has about as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.experience.samples import SamplesT
from parallel_rl.groups import all_gather, group_rank, group_size
from parallel_rl.training.batching.bin_packing import Capacity, deal
from parallel_rl.training.batching.micro_batches import fit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
