"""Statistics from the data alone, over all micro-batches and data ranks of a step; no forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import communication_device, raise_on_all_ranks
from parallel_rl.counts import ValidCounts
from parallel_rl.groups import ParallelGroups
from parallel_rl.labels import check_labels, is_shifted, with_labels
from parallel_rl.layout import SequenceLayout
from parallel_rl.losses.core.aggregation import count_units
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.checks import check_fields
from parallel_rl.losses.core.local_batch import LocalBatch
from parallel_rl.losses.core.token_weights import count_weights
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.loss import Loss
    from parallel_rl.losses.core.requirements import Requirements


def count_step(
    loss: Loss, batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]], group: ProcessGroup | None
) -> Statistics:
    """Sum what micro-batches and data ranks count; ValueError on all ranks for data that does not fit."""
    if not loss.requirements.counted:
        return Statistics({})
    labelled = [with_labels(data) for data in ([batches] if isinstance(batches, Mapping) else batches)]
    needs = loss.requirements.on_rows() if labelled and is_shifted(labelled[0]) else loss.requirements
    needs = replace(needs, fields=tuple(field for field in needs.fields if field.per != "local"))
    ids = [data["input_ids"] for data in labelled if isinstance(data.get("input_ids"), torch.Tensor)]
    device = communication_device(group, ids[0].device if ids else torch.device("cpu"))

    def check() -> None:
        for data in labelled:
            check_labels(data)
            ids = data.get("input_ids")
            check_fields(data, needs, ids if isinstance(ids, torch.Tensor) else torch.empty(0))
            if checks_values(data["input_ids"]):
                loss.check_data(data, needs)

    raise_on_all_ranks(check, [group], torch.empty(0, device=device))
    batches_of_rank = [_whole(data, needs) for data in labelled or [masked_data(needs, 0, 1)]]
    counted = reduce(add, [count_local(loss, loss.narrowed(local)) for local in batches_of_rank])
    return counted.to(device).reduce(ParallelGroups(data=group))


def count_local(loss: Loss, local: LocalBatch) -> Statistics:
    if not loss.requirements.counted:
        return Statistics({})
    batch = TokenBatch(local, ModelOutput())
    weights = Statistics({}) if local.weights is None else count_weights(local)
    return weights | count_units(batch, loss.requirements.units) | loss.count_from(batch)


def _whole(data: Mapping[str, Tensor], needs: Requirements) -> LocalBatch:
    ids = data["input_ids"]
    one = torch.ones((), dtype=torch.int64, device=ids.device)
    layout = SequenceLayout.padded(*ids.shape, device=ids.device)
    return LocalBatch(data, layout, ValidCounts(one, one), requirements=needs)


def masked_data(needs: Requirements, rows: int, width: int) -> dict[str, Tensor]:
    """Make a fully masked batch [rows, width] with every required field."""
    data = {
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
        "token_mask": torch.zeros(rows, width),
        "sample_mask": torch.zeros(rows),
    }
    for field in needs.fields:
        shape = (rows,) if field.per == "sequence" else (rows, width, 1) if field.width else (rows, width)
        data[field.name] = torch.zeros(shape, dtype=torch.float32 if field.dtype in ("float", "label") else torch.int64)
    return data
