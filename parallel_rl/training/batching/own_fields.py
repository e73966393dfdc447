"""The user's own fields of records, as fields of the rows that are made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel_rl.experience.samples import SamplesT
from parallel_rl.losses.core.requirements import Field


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
    for number, field in enumerate(fields):
        kind = torch.int64 if field.dtype == "integer" else dtype
        values = [of_row[number] for of_row in own]
        if field.per == "sequence":
            rows = rows.with_fields(**{field.name: torch.tensor(values, dtype=kind)})
            continue
        column = torch.zeros(rows.input_ids.shape, dtype=kind)
        for row, (value, end) in enumerate(zip(values, rows.lengths.tolist(), strict=True)):
            assert isinstance(value, tuple)
            column[row, end - len(value) : end] = torch.tensor(value, dtype=kind)
        rows = rows.with_fields(**{field.name: column})
    return rows
