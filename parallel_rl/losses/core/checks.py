"""What a loss asks of its batch: fields, shapes and dtypes always, values where they are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.counts import valid_tokens
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from parallel_rl.layout import SequenceLayout


@dataclass(frozen=True)
class Fields:
    """What a loss reads of its data, beside input_ids, token_mask and sample_mask, by shape, place and kind.

    token: [B, S]; those in `wide` [B, S, K]. sequence: [B]. local: in the order of the logits, on this rank only, with the
    logits' two leading dimensions. predictor: those of `token` that are stored one column before the token. integer: those
    that hold whole numbers or bools; all others are floating point. shift: whether column 0 has no predictor and so no loss.
    """

    token: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    predictor: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    integer: tuple[str, ...] = ()
    shift: bool = True


def check_statistics(loss: str, needs: bool, statistics: object) -> None:
    """Raises ValueError where a loss that needs statistics of the step has none, and the other way round."""
    if needs != (statistics is not None):
        wanted = "needs statistics=, the reduced result of its collect(...)" if needs else "takes no statistics="
        raise ValueError(f"{loss} in this configuration {wanted}")
    if statistics is not None and not isinstance(statistics, Statistics):
        raise ValueError(f"statistics must be a Statistics, the reduced result of collect(...), got {statistics!r}")


def check_counts(global_valid_seqs: object, global_valid_toks: object) -> None:
    """Raises ValueError for a count of the step that is not one number, at least 1."""
    for name, count in (("global_valid_seqs", global_valid_seqs), ("global_valid_toks", global_valid_toks)):
        if not isinstance(count, (int, float, Tensor)) or torch.as_tensor(count).numel() != 1:
            got = f"shape {list(count.shape)}" if isinstance(count, Tensor) else repr(count)
            raise ValueError(f"{name} must be one number, see count_valid; got {got}")
        if checks_values(torch.as_tensor(count)) and not count >= 1:
            raise ValueError(f"{name} = {count} must be at least 1, see count_valid")


def check_data(data: Mapping[str, Tensor], fields: Fields, head: Tensor) -> tuple[int, int]:
    """(B, S) of whole data, after a look at each field's presence, shape, dtype and device, and at values (`set_validation`).

    Args:
        head: the model's output, for its device and its leading shape.

    Raises:
        ValueError: a missing field, no tensor, another shape, dtype or device; a mask with other values than 0 and 1; NaN in a
            valid place.
    """
    names = ("input_ids", "token_mask", "sample_mask", *fields.token, *fields.sequence, *fields.local)
    for name in names:
        if name not in data:
            raise ValueError(f"data lacks the field {name!r}; this loss needs {', '.join(names)}")
        if not isinstance(data[name], Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(data[name]).__name__}")
        if data[name].device != head.device:
            raise ValueError(
                f"{name} is on {data[name].device}, the model's output on {head.device}; they must be on one device"
            )
    ids = data["input_ids"]
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be integers [B, S], got {ids.dtype} {list(ids.shape)}")
    rows, width = ids.shape
    for name in names[1:]:
        shape = tuple(data[name].shape)
        if name in fields.local:
            if shape[:2] != tuple(head.shape[:2]):
                raise ValueError(
                    f"{name} has shape {list(shape)}; it must begin like the model's output {list(head.shape)}"
                )
        elif name in fields.wide:
            if len(shape) != 3 or shape[:2] != (rows, width) or shape[2] < 1:
                raise ValueError(f"{name} has shape {list(shape)}; input_ids [B, S] calls for [{rows}, {width}, K]")
        elif shape != (wanted := (rows,) if name == "sample_mask" or name in fields.sequence else (rows, width)):
            raise ValueError(
                f"{name} has shape {list(shape)}; input_ids [B, S] = {[rows, width]} calls for {list(wanted)}"
            )
        floats = data[name].is_floating_point()
        if name in fields.integer and floats:
            raise ValueError(f"{name} must hold integers or bools, got {data[name].dtype}")
        if not floats and name not in (*fields.integer, "token_mask", "sample_mask"):
            raise ValueError(f"{name} must be floating point, got {data[name].dtype}")
    if checks_values(ids):
        _check_values(data, fields)
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


def _check_values(data: Mapping[str, Tensor], fields: Fields) -> None:
    for name in ("token_mask", "sample_mask"):
        mask = data[name]
        if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(f"{name} must hold 0 and 1 only; a weight belongs into the advantages")
    valid = valid_tokens(data, fields.shift)
    places = dict.fromkeys(fields.token, valid)
    places |= dict.fromkeys(fields.predictor, valid.roll(-1, 1))
    places |= dict.fromkeys(fields.sequence, data["sample_mask"].bool())
    for name, place in places.items():
        bad = data[name].isnan() & place.view(*place.shape, *[1] * (data[name].dim() - place.dim()))
        if bool(bad.any()):
            raise ValueError(f"{name} is NaN at {bad.nonzero()[0].tolist()}, a valid place")
