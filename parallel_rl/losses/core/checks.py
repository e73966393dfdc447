"""Checks of a loss's data: fields, shapes and dtypes always; values only if value checks are on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.counts import check_mask_dtype, check_zeros_and_ones, own_counts
from parallel_rl.labels import IGNORED, SHIFT_LABELS, check_labels, is_shifted
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.aggregation import UNIT_FIELDS, check_token_weights, check_unit_ids
from parallel_rl.losses.core.requirements import WEIGHTS, Field
from parallel_rl.losses.core.turns import check_segment_ids
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.dtensor import check_plain

if TYPE_CHECKING:
    from parallel_rl.losses.core.requirements import Requirements


_MOST = 2.0**63  # a count is an int64
#: recorded log-probs → whether they are of the truncated policy itself at an earlier step
RECORDED = {"prev_logprobs": True, "generation_logprobs": True, "reference_policy_logprobs": False}
_FINITE = ("advantages", "returns", "rewards", "values")  # −inf is valid in log-probs and in teachers' logits


def check_statistics(loss: str, needs: Requirements, statistics: object) -> None:
    ways = ["count(...)"] * needs.counted + ["collect(...).reduce(...)"] * needs.collected
    if needs.statistics != (statistics is not None):
        wanted = f"needs statistics= of the whole step, its {' | '.join(ways)}" if ways else "takes no statistics="
        raise ValueError(f"{loss} in this configuration {wanted}")
    if statistics is not None and not isinstance(statistics, Statistics):
        raise ValueError(f"statistics must be a Statistics, the loss's {' | '.join(ways)}, got {statistics!r}")


def check_predicts(loss: str, needs: Requirements, data: Mapping[str, object]) -> None:
    """Raise ValueError for shift_labels with input_ids, or for a loss that scores no predicted tokens."""
    check_labels(data)
    if not is_shifted(data):
        return
    if needs.reads == "scalar" or not needs.shift:
        what = "a scalar head's output" if needs.reads == "scalar" else "the position that holds a token"
        raise ValueError(f"{loss} reads {what}, which predicts no token; give input_ids in place of shift_labels")


def check_pairs(rows: int) -> None:
    if rows % 2:
        raise ValueError(f"preference pairs are (even, odd) rows, so their number must be even; got {rows} rows")


def check_counts(
    global_valid_seqs: object, global_valid_toks: object, data: Mapping[str, Tensor], shift: bool = True
) -> None:
    """Raise ValueError unless the step's counts are finite and ≥ those of `data`, or 1.

    A count of 1 leaves the division to the caller. `data` has checked masks; with `shift` column 0 does not count.
    """
    counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
    local = own_counts(data, shift) if checks_values(data["token_mask"]) else [0, 0]
    for (name, count), number in zip(counts.items(), map(int, local), strict=True):
        if isinstance(count, int) and count >= _MOST:
            count = float(count)  # too large for a tensor
        if not isinstance(count, (int, float, Tensor)) or torch.as_tensor(count).numel() != 1:
            got = f"shape {list(count.shape)}" if isinstance(count, Tensor) else repr(count)
            raise ValueError(f"{name} must be one number, see count_valid; got {got}")
        if not checks_values(torch.as_tensor(count)):
            continue
        value = torch.as_tensor(count).item()
        if not 1 <= value < _MOST:
            wanted = "below 2^63" if value >= _MOST else "at least 1"
            raise ValueError(f"{name} = {value:g} must be {wanted}, see count_valid")
        if 1 < value < number:
            raise ValueError(
                f"{name} = {value:g} is below the {number} of this batch alone; it counts the whole step (sequences "
                "first, then tokens: count_valid), or is 1 where the caller divides"
            )


def known_counts(global_valid_seqs: object, global_valid_toks: object) -> dict[str, float]:
    """Return the call's counts that the host knows or may read (`set_validation`), for ranks to compare."""
    known: dict[str, float] = {}
    for name, count in (("global_valid_seqs", global_valid_seqs), ("global_valid_toks", global_valid_toks)):
        on_host = isinstance(count, Tensor) and count.numel() == 1 and checks_values(count)
        if on_host or (isinstance(count, (int, float)) and abs(count) < _MOST):
            known[name] = float(count)  # type: ignore[arg-type]
    return known


def check_fields(data: Mapping[str, Tensor], needs: Requirements, output: Tensor | None = None) -> tuple[int, int]:
    """Return (B, S) of whole data after checks of presence, type, shape, dtype and device; ValueError.

    Without the model's `output`, devices, its leading shape and fields in the order of the logits are not checked.
    """
    fields = needs.fields if output is not None else [field for field in needs.fields if field.per != "local"]
    names = ("input_ids", "token_mask", "sample_mask", *(field.name for field in fields))
    for name in names:
        if name not in data:
            needed = ", ".join((*names[:3], *needs.asked))
            raise ValueError(f"data lacks the field {name!r}; this loss needs {needed}")
        if not isinstance(data[name], Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(data[name]).__name__}")
        check_plain(name, data[name])
        if output is not None:
            check_device(name, data[name], output)
    ids = data["input_ids"]
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids must be int64 or int32 [B, S], got {ids.dtype} {list(ids.shape)}")
    rows, width = ids.shape
    if needs.paired:
        check_pairs(rows)
    for name in ("token_mask", "sample_mask"):
        check_mask_dtype(name, data[name])
        _check_shape(data[name], Field(name, "token" if name == "token_mask" else "sequence"), (rows, width), output)
    for field in fields:
        _check_shape(data[field.name], field, (rows, width), output)
        check_field(field, data[field.name])
    return rows, width


def check_device(name: str, value: Tensor, output: Tensor) -> None:
    if value.device != output.device:
        raise ValueError(
            f"{name} is on {value.device}, the model's output on {output.device}; they must be on one device"
        )


def check_field(field: Field, value: Tensor) -> None:
    if field.dtype == "mask":
        return check_mask_dtype(field.name, value)
    right = value.is_floating_point() != (field.dtype == "integer") or (
        field.dtype == "label" and value.dtype == torch.bool
    )
    if value.is_complex() or not right:
        wanted = {"float": "be floating point", "label": "be floating point or bool"}.get(
            field.dtype, "hold integers or bools"
        )
        raise ValueError(f"{field.name} must {wanted}, got {value.dtype}")
    if value.is_floating_point() and value.dtype.itemsize < 2:
        raise ValueError(f"{field.name} must have 16 bits or more, got {value.dtype}")
    if value.requires_grad:
        raise ValueError(f"{field.name} requires a gradient, which ends at the data; give {field.name}.detach()")


def _check_shape(value: Tensor, field: Field, batch: tuple[int, int], output: Tensor | None) -> None:
    shape, name = tuple(value.shape), field.name
    if field.per == "local":
        if output is not None and shape[:2] != tuple(output.shape[:2]):
            raise ValueError(
                f"{name} has shape {list(shape)}; it must begin like the model's output {list(output.shape)}"
            )
    elif field.width:
        if len(shape) != 3 or shape[:2] != batch or shape[2] < 1:
            raise ValueError(f"{name} has shape {list(shape)}; input_ids [B, S] calls for [{batch[0]}, {batch[1]}, K]")
    elif shape != (wanted := batch[:1] if field.per == "sequence" else batch):
        raise ValueError(f"{name} has shape {list(shape)}; input_ids [B, S] = {list(batch)} calls for {list(wanted)}")


def check_lengths(scored: Tensor, lengths: Tensor) -> None:
    beyond = scored & (torch.arange(scored.shape[1], device=lengths.device) >= lengths[:, None])
    if bool(beyond.any()):
        row, column = beyond.nonzero()[0].tolist()
        raise ValueError(
            f"token_mask is set at [{row}, {column}], but cu_seqlens gives sequence {row} {int(lengths[row])} tokens"
        )


def check_temperature(data: Mapping[str, Tensor], needs: Requirements) -> None:
    if needs.field("temperature").per != "sequence":  # a loss's own field may have the name
        return
    value = data["temperature"]
    wrong = ~((value > 0) & value.isfinite()) & data["sample_mask"].bool()
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(f"temperature = {float(value[row])} of sample {row} must be positive and finite")


def check_log_probs(logprobs: Tensor, valid: Tensor, name: str = "logprobs") -> None:
    """Raise ValueError for valid log-probs above 0 (beyond rounding); the message guesses the cause."""
    above = (logprobs > (1e-3 if logprobs.dtype.itemsize > 2 else 0.25)) & valid
    if not bool(above.any()):
        return
    place, scored = above.nonzero()[0].tolist(), logprobs[valid]
    probably = "probabilities (take their log), or log-probs with the sign changed (give them negative)"
    if bool((scored < 0).any()):
        probably = "logits of the tokens without their normaliser (subtract the logsumexp over the vocabulary)"
    elif bool((scored > 1).any()):
        probably = "log-probs with the sign changed, or losses (give them negative)"
    raise ValueError(f"{name} is {float(logprobs[tuple(place)]):g} at {place}, above 0; these are probably {probably}")


def check_values(data: Mapping[str, Tensor], needs: Requirements, truncated: bool = False) -> None:
    """Check the values of data whose shapes are right; `truncated`: recorded log-probs may be −inf.

    Raises ValueError for masks other than 0 and 1, for a wrong value at a valid place, and for decreasing segment ids.
    """
    check_zeros_and_ones(data)
    valid = valid_tokens(data, needs.shift)
    if is_shifted(data) and bool((unlabelled := valid & (data[SHIFT_LABELS] == IGNORED)).any()):
        raise ValueError(
            f"token_mask is 1 at {unlabelled.nonzero()[0].tolist()}, where {SHIFT_LABELS} is {IGNORED}: with {SHIFT_LABELS} "
            "column t of every field belongs to what position t predicts; shift token_mask like the labels, or leave it out"
        )
    if needs.token_weights is not None:
        check_token_weights(data[WEIGHTS.name], valid)
        valid = valid & (data[WEIGHTS.name] > 0)
    if "segment_ids" in needs.names:
        check_segment_ids(data["segment_ids"], valid)
    for field in UNIT_FIELDS.values():
        if field.per == "sequence" and field.name in needs.names:
            check_unit_ids(field.name, data[field.name], data["sample_mask"])
    for field in needs.fields:
        if field.per == "local":
            continue
        place = valid if field.alignment == "token" else valid.roll(-1, 1)
        if field.per == "sequence":
            place = data["sample_mask"].bool()
        values = data[field.name]
        wrong = ~values.isfinite() if field.name in _FINITE else values.isnan()
        bad = wrong & place.view(*place.shape, *[1] * (values.dim() - place.dim()))
        if bool(bad.any()):
            at = bad.nonzero()[0].tolist()
            what = "NaN" if bool(values[tuple(at)].isnan()) else f"{float(values[tuple(at)]):g}"
            raise ValueError(f"{field.name} is {what} at {at}, a valid place")
        if field.name in RECORDED:
            check_log_probs(values, place, field.name)
        if field.name in RECORDED and not (truncated and RECORDED[field.name]):
            gone = values.isneginf() & place
            if bool(gone.any()):
                raise ValueError(
                    f"{field.name} is -inf at {gone.nonzero()[0].tolist()}, a valid place: a token of probability 0 is never "
                    "sampled; mask it, or record its log-prob"
                    + (", or give the loss the sampler's top_k or top_p" if RECORDED[field.name] else "")
                )
