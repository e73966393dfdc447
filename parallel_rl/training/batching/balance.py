"""Rows move between data ranks until each has about as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
) -> tuple[SamplesT, list[int]]:
    """Redistribute the rows of all data ranks, so that their tokens are nearly even in each part of the step.

    The deal depends on the lengths alone. A part is dealt by itself, as it is an optimizer step.

    Args:
        rows: this rank's; every rank has the same fields.
        capacity: of a micro-batch, which every unit of the step must fit.
        group: the data ranks.
        device: where the group communicates.
        parts: equal parts of this rank's rows, one after the other.
        together: rows that stay together, one after the other.
        loads: tokens that this rank has already in each part; empty is nothing.

    Returns:
        this rank's rows, part after part, and how many there are in each.

    Raises:
        ValueError: a unit that is longer than a micro-batch, rows that do not make whole units in each part; on every rank.
    """
    size, rank = group_size(group), group_rank(group)
    facts = torch.tensor([len(rows), rows.input_ids.shape[1], *(loads or [0] * parts)], device=device)
    of_ranks: list[list[int]] = all_gather(facts, group).tolist()
    lengths = _lengths(rows, max(fact[0] for fact in of_ranks), of_ranks, group, device)
    owners = _owners(lengths, [fact[2:] for fact in of_ranks], capacity, parts, together)
    if size > 1:
        rows = _exchange(rows, owners, max(fact[1] for fact in of_ranks), rank, group, device)
    # what came, in the order of its ranks: to which part each row belongs
    part = torch.cat([_parts(len(owner), parts)[owner == rank] for owner in owners])
    return rows.select(part.argsort(stable=True).tolist()), part.bincount(minlength=parts).tolist()


def _lengths(
    rows: SamplesT, most: int, of_ranks: list[list[int]], group: ProcessGroup | None, device: torch.device
) -> list[list[int]]:
    """The lengths of every rank's rows."""
    mine = torch.nn.functional.pad(rows.lengths, (0, most - len(rows))).to(device)
    gathered: list[list[int]] = all_gather(mine, group).tolist()
    return [every[: facts[0]] for every, facts in zip(gathered, of_ranks, strict=True)]


def _owners(
    lengths: list[list[int]], loads: list[list[int]], capacity: Capacity, parts: int, together: int
) -> list[Tensor]:
    """The rank that each row of each rank goes to."""
    for rank, of_rank in enumerate(lengths):
        if len(of_rank) % (parts * together):
            raise ValueError(f"data rank {rank} has {len(of_rank)} rows; {parts} parts need whole units of {together}")
        capacity.rooms(of_rank, together)
    owners = [torch.zeros(len(of_rank), dtype=torch.int64) for of_rank in lengths]
    for part in range(parts):
        weights, starts = [], []
        for rank, of_rank in enumerate(lengths):
            size = len(of_rank) // parts
            for first in range(part * size, (part + 1) * size, together):
                weights.append(sum(of_rank[first : first + together]))
                starts.append((rank, first))
        dealt = deal(weights, len(lengths), [of_rank[part] for of_rank in loads])
        for (rank, first), owner in zip(starts, dealt, strict=True):
            owners[rank][first : first + together] = owner
    return owners


def _parts(count: int, parts: int) -> Tensor:
    """The part of each of `count` rows."""
    return torch.arange(parts).repeat_interleave(count // parts)


def _exchange(
    rows: SamplesT, owners: Sequence[Tensor], width: int, rank: int, group: ProcessGroup | None, device: torch.device
) -> SamplesT:
    """This rank's new rows, in the order of the ranks and indices that they come from; one all-to-all of bytes."""
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
    """[N] or [N, S] to [N, bytes]."""
    table = field if field.dim() == 2 else field[:, None]
    return table.contiguous().view(torch.uint8)


def _from_bytes(data: Tensor, like: Tensor) -> Tensor:
    table = data.contiguous().view(like.dtype)
    return table if like.dim() == 2 else table[:, 0]
