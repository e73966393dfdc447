"""One call of a loss on log-probs: what a loss must not read, and the data as rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.counts import check_mask_dtype
from parallel_rl.groups import group_size
from parallel_rl.losses.core.checks import check_field
from parallel_rl.losses.core.data_view import IN_ROW
from parallel_rl.losses.core.log_prob_rows import Cut, Rows, Values, rows_of
from parallel_rl.vocab.dtensor import check_plain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.options import VocabOptions
    from parallel_rl.losses.core.requirements import Field, Requirements
    from parallel_rl.statistics import Statistics

_READS = {
    "logits": "whole rows of logits; call it with logits or an LMHeadInput",
    "rows": "whole rows of logits; call it with logits or an LMHeadInput",
    "scalar": "a scalar head's output; call it with that",
}
_MASKS = {"token_mask": False, "response_mask": True}  # whether it says that rows are responses alone


@dataclass(frozen=True, eq=False)
class LogProbCall:
    """The arguments of one call on log-probs; see `LossFn.from_logprobs`."""

    logprobs: Values
    data: Mapping[str, Values]
    global_valid_seqs: Tensor
    global_valid_toks: Tensor
    context_group: ProcessGroup | None = None
    cu_seqlens: Tensor | None = None
    entropy: Values | None = None
    statistics: Statistics | None = None

    @property
    def like(self) -> Tensor:
        """The log-probs, or the first of them: their device and dtype."""
        if isinstance(self.logprobs, Tensor):
            return self.logprobs
        return next((x for x in self.logprobs if isinstance(x, Tensor)), torch.empty(0))

    @property
    def names(self) -> set[str]:
        """Names of what the data has, by the mask's name in the ordinary call."""
        return {"token_mask" if name == "response_mask" else name for name in self.data}

    @property
    def facts(self) -> dict[str, int]:
        """Numbers in which context ranks must agree."""
        bounds, given = self.cu_seqlens, self.logprobs
        if isinstance(bounds, Tensor) and bounds.dim() == 1:
            return {"the number of sequences": len(bounds) - 1}
        sized = not isinstance(given, Tensor) or given.dim() > 1
        return {"the number of sequences": len(given) if sized else 0}


def check_reads(loss: str, needs: Requirements, options: VocabOptions, call: LogProbCall) -> None:
    """Refuse a loss that reads more than the log-probs of a call.

    Raises:
        ValueError: it does; `loss` is the name that it shows.
    """
    if needs.reads != "log-probs":
        raise ValueError(f"{loss} reads more than log-probs: {_READS[needs.reads]}")
    if options.truncation:
        raise ValueError(
            f"{loss} with {options.truncation} reads more than log-probs: which tokens the truncated policy keeps; "
            "call it with logits or an LMHeadInput"
        )
    if options.per_sample or options.temperature != 1:
        raise ValueError(
            f"temperature = {options.temperature!r} has no effect on log-probs, which have the host's; leave it out"
        )
    if options.logit_scale != 1:
        raise ValueError(f"logit_scale = {options.logit_scale} has no effect on log-probs; leave it out")
    if options.consume_logits:
        raise ValueError("consume_logits = True has no effect on log-probs; leave it out")
    if needs.entropy and not needs.entropy_measured and call.entropy is None:
        raise ValueError(f"{loss} in this configuration reads the entropy of the policy; give entropy=")
    trained = needs.entropy and not needs.entropy_measured and needs.entropy_gradient
    if trained and call.entropy is not None and _has_gradient(call.logprobs) and not _has_gradient(call.entropy):
        raise ValueError(
            f"entropy has no gradient, the log-probs have one, and {loss} in this configuration trains on both; compute the "
            "entropy with its gradient, too"
        )
    if needs.reads_places and group_size(call.context_group) > 1:
        raise ValueError(
            f"{loss} in this configuration needs to know where in its sequence a token lies, which a row that is cut "
            "over context ranks does not tell; gather the rows, and give no context_parallel_group"
        )


def _each(values: Values) -> list[Tensor]:
    """The tensors of a field, padded or listed; what is none is refused with the shapes."""
    return [x for x in ([values] if isinstance(values, Tensor) else values) if isinstance(x, Tensor)]


def rows_and_data(call: LogProbCall, needs: Requirements, options: VocabOptions) -> tuple[Rows, dict[str, Tensor]]:
    """The form of a call, and its data as rows.

    Raises:
        ValueError: a field that is missing or of another form, shape, dtype or device than the log-probs.
    """
    masks = [name for name in _MASKS if name in call.data]
    if len(masks) != 1:
        raise ValueError(
            "data must have one mask: token_mask, of whole sequences, or response_mask, of responses alone; it has "
            f"{' and '.join(masks) or 'neither'}"
        )
    for name in (masks[0], "sample_mask"):
        for mask in _each(call.data.get(name, ())):
            check_mask_dtype(name, mask)
    check_plain("logprobs", call.like)
    if not call.like.is_floating_point():
        raise ValueError(f"log-probs must be floating point, got {call.like.dtype}")
    if call.like.dtype.itemsize < 4:
        warn_of_precision(call.like.dtype)
    responses = _MASKS[masks[0]]
    rows = rows_of(call.logprobs, Cut(responses, call.context_group, options.cp_layout), call.cu_seqlens)
    names = (masks[0], *needs.names)
    data: dict[str, Tensor] = {}
    for name in names:
        if name not in call.data:
            raise ValueError(f"data lacks the field {name!r}; this loss needs {', '.join((masks[0], *needs.asked))}")
        field = needs.field(name)
        if field.alignment == "predictor" and responses:
            raise ValueError(
                f"{name} is stored at the position that predicts its token, which responses alone do not have"
            )
        per_row = field.per == "sequence"
        value = call.data[name]
        if name in needs.names:
            for each in _each(value):
                check_field(field, each)
        found = _per_row(name, value, rows, call) if per_row else field_rows(name, value, rows, call, field)
        data["token_mask" if name == masks[0] else name] = found
    if masks[0] in needs.names:  # a component names it
        data[masks[0]] = data["token_mask"]
    given = call.logprobs
    places = torch.ones_like(given) if isinstance(given, Tensor) else [torch.ones_like(x) for x in given]
    data[IN_ROW] = rows.take(places).bool()
    ones = data["token_mask"].new_ones(rows.number)
    masked = "sample_mask" in call.data
    data["sample_mask"] = _per_row("sample_mask", call.data["sample_mask"], rows, call) if masked else ones
    return rows, data


def counted_rows(call: LogProbCall, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The data; without a `sample_mask` its rows are those with a token: a host may mask a row's tokens to leave it out."""
    return data if "sample_mask" in call.data else {**data, "sample_mask": data["token_mask"].bool().any(1)}


def check_mask(call: LogProbCall, rows: Rows, sample_mask: Tensor) -> None:
    """Check that a `token_mask` counts no first token that has a log-prob: nothing predicts it, so rows are responses then.

    Raises:
        ValueError: one does.
    """
    if "token_mask" not in call.data:
        return
    mask, logprobs = rows.first(call.data["token_mask"]), rows.first(call.logprobs)
    given = mask.bool() & sample_mask.bool() & logprobs.isfinite() & (logprobs != 0)
    if bool(given.any()):
        row = int(given.nonzero()[0, 0])
        raise ValueError(
            f"token_mask is 1 at [{row}, 0], a first token, which nothing predicts, and its log-prob is {logprobs[row]:g}. "
            "Name the mask response_mask if rows are responses alone; set its column 0 to 0 if they are whole sequences"
        )


@cache
def warn_of_precision(dtype: torch.dtype) -> None:
    """Warn, once a process, of log-probs of 16 bits."""
    warnings.warn(
        f"log-probs in {dtype} change the gradient by some percent; compute them in float32, from logits of any dtype",
        stacklevel=2,
    )


def _has_gradient(values: Values) -> bool:
    return any(x.requires_grad for x in ([values] if isinstance(values, Tensor) else values))


def field_rows(name: str, values: Values, rows: Rows, call: LogProbCall, field: Field | None = None) -> Tensor:
    try:
        own, theirs = rows.shape_of(values), rows.shape_of(call.logprobs)
        if own != theirs:
            raise ValueError(f"has shape {_text(own)}; the log-probs have {_text(theirs)}, and they must be alike")
        width = 1 if field is not None and field.width else 0
        for x in [values] if isinstance(values, Tensor) else values:
            if x.dim() != call.like.dim() + width:
                raise ValueError(f"has shape {list(x.shape)}; the log-probs have {list(call.like.shape)}")
            if x.device != call.like.device:
                raise ValueError(_of_devices(x, call))
        return rows.take(values, "token" if field is None else field.alignment)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def _per_row(name: str, values: Values, rows: Rows, call: LogProbCall) -> Tensor:
    if not isinstance(values, Tensor):
        raise ValueError(f"{name} must be a tensor [{rows.number}], got {type(values).__name__}")
    if values.shape != (rows.number,):
        raise ValueError(f"{name} has shape {list(values.shape)}; {rows.number} sequences call for [{rows.number}]")
    if values.device != call.like.device:
        raise ValueError(f"{name} {_of_devices(values, call)}")
    return values


def _of_devices(values: Tensor, call: LogProbCall) -> str:
    return f"is on {values.device}, the model's output on {call.like.device}; they must be on one device"


def _text(shape: object) -> str:
    return str(list(shape)) if isinstance(shape, tuple) else str(shape)
