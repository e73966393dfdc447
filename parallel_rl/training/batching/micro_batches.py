"""Micro-batches of whole rows for the model and the losses, padded or packed, with the user's own fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel_rl import megatron
from parallel_rl.experience.samples import Samples, SamplesT, padded_samples
from parallel_rl.groups import ParallelGroups
from parallel_rl.losses.core.requirements import Field
from parallel_rl.megatron import packed_batch, packed_bounds, padded_batch
from parallel_rl.training.tokenizer.protocol import Target


@dataclass(frozen=True)
class MicroBatch(megatron.MicroBatch):
    """Rows for model and loss; `indices` of the rows in their source, `tokens`: the sum of true lengths.

    `groups_cut` counts groups of prefix trees whose last part is here, `tokens_repeated` the tokens that their parts repeat.
    """

    indices: list[int] = field(kw_only=True)
    tokens: int = field(kw_only=True)
    groups_cut: int = field(default=0, kw_only=True)
    tokens_repeated: int = field(default=0, kw_only=True)

    @property
    def computed(self) -> int:
        """Return the tokens that the model computes; prefix trees hold each shared token once."""
        return self.tokens if self.input.tree is None else self.input.tree.tokens


def local_share(items: Sequence[int], groups: ParallelGroups) -> list[int]:
    """Return this data rank's equal share of a list; ValueError if the data ranks do not divide it."""
    size, rest = divmod(len(items), groups.dp_size)
    if rest:
        raise ValueError(f"{len(items)} sequences are not divisible by the {groups.dp_size} data parallel ranks")
    return list(items[groups.dp_rank * size : (groups.dp_rank + 1) * size])


def local_shares(count: int, parts: int, groups: ParallelGroups) -> list[int]:
    """Return this data rank's share of each of `parts` equal, consecutive parts of range(count)."""
    size = count // parts
    return [index for part in range(parts) for index in local_share(range(part * size, (part + 1) * size), groups)]


def target_rows(prompts: Sequence[Sequence[int]], targets: Sequence[Target]) -> Samples:
    return padded_samples(prompts, [target.tokens for target in targets], masks=[target.mask for target in targets])


def in_order(count: int, size: int) -> list[list[int]]:
    """Split the indices of `count` rows into lists of `size`."""
    return [list(range(first, min(first + size, count))) for first in range(0, count, size)]


def micro_batches(
    rows: Samples,
    bins: Sequence[list[int]],
    *,
    packing: bool,
    unit: int,
    device: torch.device,
    row_unit: int | None = None,
) -> list[MicroBatch]:
    """Build micro-batches of this rank's rows from indices `bins`; ValueError if lengths do not fit.

    `unit` divides a padded width (see `width_unit`), `row_unit` the length of a packed row if the layout needs less.
    """
    return [_micro_batch(rows.select(indices), indices, packing, unit, row_unit, device) for indices in bins]


def width_unit(*, tensor: int, context: int, sequence_parallel: bool) -> int:
    """Return the unit of a row's width: 2·cp zigzag chunks, and tp equal parts on each context rank."""
    chunks = 2 * context if context > 1 else 1
    return math.lcm(chunks, context * tensor) if sequence_parallel else chunks


def fit(field: Tensor, width: int) -> Tensor:
    """Cut off or add padding: [N, S] to [N, width]."""
    if field.shape[1] >= width:
        return field[:, :width].contiguous()
    return torch.nn.functional.pad(field, (0, width - field.shape[1]))


def _micro_batch(
    rows: Samples, indices: list[int], packing: bool, unit: int, row_unit: int | None, device: torch.device
) -> MicroBatch:
    longest = int(rows.lengths.max())
    width = longest if packing else -(-longest // unit) * unit
    data = {name: fit(field, width) if field.dim() == 2 else field for name, field in rows.data().items()}
    if packing:
        total = None
        if row_unit is not None:
            total = -(-int(packed_bounds(rows.lengths)[1][-1]) // row_unit) * row_unit
        batch = packed_batch(data, rows.lengths, total=total, device=device)
    else:
        batch = padded_batch(data, device=device)
    tokens = int(rows.lengths.sum())
    return MicroBatch(batch.input, batch.data, batch.packed, batch.carries, indices=indices, tokens=tokens)


def with_user_fields(
    rows: SamplesT,
    user_values: Sequence[Sequence[float | tuple[float, ...]]],
    fields: Sequence[Field],
    starts: Sequence[int],
    dtype: torch.dtype,
) -> SamplesT:
    """Add the user's own `fields`, [N] of sequences and [N, S] of tokens.

    `user_values` has each row's values of `fields`, in order; a cut answer has more values than tokens. `starts` has the place
    of each row's first value of a token, `dtype` is of fields that are not integers.
    """
    for number, kept in enumerate(fields):
        kind = torch.int64 if kept.dtype == "integer" else dtype
        values = [of_row[number] for of_row in user_values]
        if kept.per == "sequence":
            rows = rows.with_fields(**{kept.name: torch.tensor(values, dtype=kind)})
            continue
        column = torch.zeros(rows.input_ids.shape, dtype=kind)
        for row, (value, start, end) in enumerate(zip(values, starts, rows.lengths.tolist(), strict=True)):
            assert isinstance(value, tuple)
            column[row, start:end] = torch.tensor(value[: end - start], dtype=kind)
        rows = rows.with_fields(**{kept.name: column})
    return rows
