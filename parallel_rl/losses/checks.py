"""What a loss asks of its batch: fields, shapes and dtypes always, values where they are looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.reduce import valid_tokens
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from parallel_rl.layout import SequenceLayout


def check_data(
    data: Mapping[str, Tensor],
    token_fields: Sequence[str],
    sequence_fields: Sequence[str],
    predictor_fields: Sequence[str],
    device: torch.device,
) -> tuple[int, int]:
    """(B, S) of whole data, after a look at each field's presence, shape, dtype and device, and at values (`set_validation`).

    Raises:
        ValueError: a missing field, no tensor, another shape, dtype or device; a mask with other values than 0 and 1; NaN in a
            valid place.
    """
    names = ("input_ids", "token_mask", "sample_mask", *token_fields, *sequence_fields)
    for name in names:
        if name not in data:
            raise ValueError(f"data lacks the field {name!r}; this loss needs {', '.join(names)}")
        if not isinstance(data[name], Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(data[name]).__name__}")
        if data[name].device != device:
            raise ValueError(
                f"{name} is on {data[name].device}, the model's output on {device}; they must be on one device"
            )
    ids = data["input_ids"]
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be integers [B, S], got {ids.dtype} {list(ids.shape)}")
    rows, width = ids.shape
    for name in names[1:]:
        wanted = (rows,) if name == "sample_mask" or name in sequence_fields else (rows, width)
        if tuple(data[name].shape) != wanted:
            raise ValueError(
                f"{name} has shape {list(data[name].shape)}; input_ids [B, S] = {[rows, width]} calls for {list(wanted)}"
            )
        if name in (*token_fields, *sequence_fields) and not data[name].is_floating_point():
            raise ValueError(f"{name} must be floating point, got {data[name].dtype}")
    if checks_values(ids):
        _check_values(data, token_fields, sequence_fields, predictor_fields)
    return rows, width


def check_lengths(data: Mapping[str, Tensor], layout: SequenceLayout) -> None:
    """Every token that carries loss lies within its sequence in the packed row, where values are checked.

    Raises:
        ValueError: one that does not; it would be counted and never summed.
    """
    if not checks_values(data["token_mask"]):
        return
    columns = torch.arange(layout.shape[1], device=layout.lengths.device)
    beyond = valid_tokens(data) & (columns >= layout.lengths[:, None])
    if bool(beyond.any()):
        row, column = beyond.nonzero()[0].tolist()
        raise ValueError(
            f"token_mask is set at [{row}, {column}], but cu_seqlens gives sequence {row} "
            f"{int(layout.lengths[row])} tokens"
        )


def _check_values(
    data: Mapping[str, Tensor],
    token_fields: Sequence[str],
    sequence_fields: Sequence[str],
    predictor_fields: Sequence[str],
) -> None:
    for name in ("token_mask", "sample_mask"):
        mask = data[name]
        if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(f"{name} must hold 0 and 1 only; a weight belongs into the advantages")
    valid = valid_tokens(data)
    places = dict.fromkeys(token_fields, valid)
    places |= dict.fromkeys(predictor_fields, valid.roll(-1, 1))
    places |= dict.fromkeys(sequence_fields, data["sample_mask"].bool())
    for name, place in places.items():
        bad = data[name].isnan() & place
        if bool(bad.any()):
            raise ValueError(f"{name} is NaN at {bad.nonzero()[0].tolist()}, a valid place")
