"""From sequences of tokens to what the model and the losses read: whole rows, cut into micro-batches, padded or packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from parallel_rl.counts import valid_tokens
from parallel_rl.experience.samples import Samples
from parallel_rl.groups import ParallelGroups
from parallel_rl.losses.core.base import LossFn
from parallel_rl.megatron import ModelInput, packed_bounds, packed_input, padded_input
from parallel_rl.packing import SequencePackingLossWrapper


@dataclass(frozen=True)
class MicroBatch:
    """The model's input on this rank, and the whole data of the same sequences for the loss.

    `places` are those of the sequences among the rows that they were taken from, `tokens` their true lengths summed up,
    `carries`, on the host, says which of this rank's positions carry loss, [B, S/cp] or packed [1, T/cp].
    """

    input: ModelInput
    data: Mapping[str, Tensor]
    bounds: tuple[Tensor, Tensor] | None
    places: list[int]
    tokens: int
    carries: Tensor

    def carrying(self, parts: int) -> int:
        """How many positions carry loss in the largest of `parts` equal cuts of this rank's sequence; no wait for a device."""
        rows = self.carries.shape[0]
        return int(self.carries.view(rows, parts, -1).sum((0, 2)).max())

    def wrap(self, loss_fn: LossFn) -> LossFn | SequencePackingLossWrapper:
        """`loss_fn` for this micro-batch's logits: packed ones need the bounds."""
        return loss_fn if self.bounds is None else SequencePackingLossWrapper(loss_fn, *self.bounds)

    def with_data(self, **fields: Tensor) -> MicroBatch:
        return replace(self, data={**self.data, **fields})


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


def in_order(count: int, size: int) -> list[list[int]]:
    """The places of `count` rows, `size` at a time."""
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
    """This rank's rows, in micro-batches of the places in `bins`.

    Args:
        unit: a padded width is a multiple of it: see `width_unit`.
        row_unit: the length of a packed row is a multiple of it, where that is more than the layout needs.

    Raises:
        ValueError: from the layout, where lengths do not fit.
    """
    return [_micro_batch(rows.select(places), places, packing, unit, row_unit, device) for places in bins]


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
    rows: Samples, places: list[int], packing: bool, unit: int, row_unit: int | None, device: torch.device
) -> MicroBatch:
    longest = int(rows.lengths.max())
    width = longest if packing else -(-longest // unit) * unit
    host = {name: fit(field, width) if field.dim() == 2 else field for name, field in rows.data().items()}
    data = {name: field.to(device) for name, field in host.items()}
    make_input: Callable[[Tensor], ModelInput] = padded_input
    bounds = None
    if packing:
        true, room = packed_bounds(rows.lengths)
        if row_unit is not None:
            true, room = packed_bounds(rows.lengths, total=-(-int(room[-1]) // row_unit) * row_unit)
        make_input = partial(packed_input, cu_seqlens=true, cu_seqlens_padded=room)
        bounds = true.to(device), room.to(device)
    model_input = make_input(data["input_ids"])
    layout = (model_input if device.type == "cpu" else make_input(host["input_ids"])).layout
    carries = layout.shard(valid_tokens(host), fill=False).view(layout.local_shape)
    return MicroBatch(model_input, data, bounds, places, int(rows.lengths.sum()), carries)
