"""Statistics from the data alone, over all micro-batches and data ranks of a step: no model, no forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import communication_device, raise_on_all_ranks
from parallel_rl.counts import ValidCounts
from parallel_rl.groups import ParallelGroups
from parallel_rl.labels import check_labels
from parallel_rl.layout import SequenceLayout
from parallel_rl.losses.core.checks import check_data
from parallel_rl.losses.core.local_batch import LocalBatch
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.requirements import Requirements
    from parallel_rl.statistics import Statistics


def count_step(
    count: Callable[[LocalBatch], Statistics],
    check_values: Callable[[Mapping[str, Tensor], Requirements], None],
    needs: Requirements,
    batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    group: ProcessGroup | None,
) -> Statistics:
    """Sum `count` of every micro-batch, then over data ranks; a rank without a micro-batch counts an empty one.

    Args:
        count: of a micro-batch's whole data, in whose layout one rank holds everything.
        check_values: refuses values of data of the right shapes, where values are looked at.
        needs: of the loss; fields in the order of the logits are not looked at.

    Raises:
        ValueError: data that does not fit `needs`, on all ranks of the group.
    """
    needs = replace(needs, fields=tuple(field for field in needs.fields if field.per != "local"))
    given = [batches] if isinstance(batches, Mapping) else list(batches)
    ids = [data["input_ids"] for data in given if isinstance(data.get("input_ids"), torch.Tensor)]
    device = communication_device(group, ids[0].device if ids else torch.device("cpu"))

    def check() -> None:
        for data in given:
            check_labels(data)
            ids = data.get("input_ids")
            check_data(data, needs, ids if isinstance(ids, torch.Tensor) else torch.empty(0))
            if checks_values(data["input_ids"]):
                check_values(data, needs)

    raise_on_all_ranks(check, [group], torch.empty(0, device=device))
    counted = reduce(add, [count(_whole(data, needs)) for data in given or [masked_data(needs, 0, 1)]])
    return counted.to(device).reduce(ParallelGroups(data=group))


def _whole(data: Mapping[str, Tensor], needs: Requirements) -> LocalBatch:
    ids = data["input_ids"]
    one = torch.ones((), dtype=torch.int64, device=ids.device)
    layout = SequenceLayout.padded(*ids.shape, device=ids.device)
    return LocalBatch(data, layout, ValidCounts(one, one), requirements=needs)


def masked_data(needs: Requirements, rows: int, width: int) -> dict[str, Tensor]:
    """Make data [rows, width] with every field of `needs` and nothing that counts, for a rank without a micro-batch.

    >>> from parallel_rl.losses.core.requirements import Requirements
    >>> masked_data(Requirements(), 1, 4)["token_mask"]
    tensor([[0., 0., 0., 0.]])
    """
    data = {
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
        "token_mask": torch.zeros(rows, width),
        "sample_mask": torch.zeros(rows),
    }
    for field in needs.fields:
        shape = (rows,) if field.per == "sequence" else (rows, width, 1) if field.width else (rows, width)
        data[field.name] = torch.zeros(shape, dtype=torch.float32 if field.dtype == "float" else torch.int64)
    return data
