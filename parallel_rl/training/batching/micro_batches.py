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
    """Rows for the model and the loss, `indices`: those of the rows among the ones they were taken from, and `tokens`: their
    true lengths summed up.

    `groups_cut` counts groups of prefix trees whose last part is here, `tokens_repeated` the tokens that their parts repeat.
    """

    indices: list[int] = field(kw_only=True)
    tokens: int = field(kw_only=True)
    groups_cut: int = field(default=0, kw_only=True)
    tokens_repeated: int = field(default=0, kw_only=True)

    @property
    def computed(self) -> int:
        """Tokens that the row holds: of prefix trees each shared one once."""
        return self.tokens if self.input.tree is None else self.input.tree.tokens


def local_share(items: Sequence[int], groups: ParallelGroups) -> list[int]:
    """This data rank's equal share of a list that every rank knows.

    Raises:
        ValueError: it is not divisible by the data ranks.
    """
    size, rest = divmod(len(items), groups.dp_size)
    if rest:
        raise ValueError(f"{len(items)} sequences are not divisible by the {groups.dp_size} data parallel ranks")
    return list(items[groups.dp_rank * size : (groups.dp_rank + 1) * size])


def local_shares(count: int, parts: int, groups: ParallelGroups) -> list[int]:
    """This data rank's share of each of `parts` equal parts of range(count), one after the other."""
    size = count // parts
    return [index for part in range(parts) for index in local_share(range(part * size, (part + 1) * size), groups)]


def target_rows(prompts: Sequence[Sequence[int]], targets: Sequence[Target]) -> Samples:
    """Rows of prompts with what is to be learned behind them."""
    return padded_samples(prompts, [one.tokens for one in targets], masks=[one.mask for one in targets])


def in_order(count: int, size: int) -> list[list[int]]:
    """The indices of `count` rows, `size` at a time."""
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
    """This rank's rows, in micro-batches of the indices in `bins`.

    Args:
        unit: a padded width is a multiple of it: see `width_unit`.
        row_unit: the length of a packed row is a multiple of it, where that is more than the layout needs.

    Raises:
        ValueError: from the layout, where lengths do not fit.
    """
    return [_micro_batch(rows.select(indices), indices, packing, unit, row_unit, device) for indices in bins]


def width_unit(*, tensor: int, context: int, sequence_parallel: bool) -> int:
    """The unit of a row's width: 2·cp chunks of the zigzag layout, and tp equal parts of each context rank's share."""
    chunks = 2 * context if context > 1 else 1
    return math.lcm(chunks, context * tensor) if sequence_parallel else chunks


def fit(field: Tensor, width: int) -> Tensor:
    """[N, S] to [N, width]: cut off padding, or add some."""
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


def with_own_fields(
    rows: SamplesT,
    own: Sequence[Sequence[float | tuple[float, ...]]],
    fields: Sequence[Field],
    dtype: torch.dtype,
) -> SamplesT:
    """Add fields [N] of sequences and [N, S] of tokens, which stand on a rollout's last ones.

    Args:
        rows: one of each record.
        own: of each row the values of `fields`, in order.
        fields: the user's own.
        dtype: of those that hold no integers.
    """
    for number, kept in enumerate(fields):
        kind = torch.int64 if kept.dtype == "integer" else dtype
        values = [of_row[number] for of_row in own]
        if kept.per == "sequence":
            rows = rows.with_fields(**{kept.name: torch.tensor(values, dtype=kind)})
            continue
        column = torch.zeros(rows.input_ids.shape, dtype=kind)
        for row, (value, end) in enumerate(zip(values, rows.lengths.tolist(), strict=True)):
            assert isinstance(value, tuple)
            column[row, end - len(value) : end] = torch.tensor(value, dtype=kind)
        rows = rows.with_fields(**{kept.name: column})
    return rows
