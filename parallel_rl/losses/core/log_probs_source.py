"""A host's log-probs as a source: checks of what the loss reads, and the data as rows."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.counts import check_mask_dtype
from parallel_rl.groups import group_size
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.checks import check_device, check_field, check_log_probs, check_pairs
from parallel_rl.losses.core.data_view import IN_ROW
from parallel_rl.losses.core.log_prob_rows import Cut, Rows, row_layout, rows_of
from parallel_rl.losses.core.readers import check_declared
from parallel_rl.losses.core.requirements import Field
from parallel_rl.losses.core.source import Agreement, HostValues, Placed, Source
from parallel_rl.replicated import Replicated
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.dtensor import check_plain
from parallel_rl.vocab.stats import TokenStats

if TYPE_CHECKING:
    from parallel_rl.losses.core.call import HostLogProbs, LossCall
    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.losses.core.log_prob_rows import Values
    from parallel_rl.losses.core.loss import Loss
    from parallel_rl.losses.core.requirements import Requirements

_READS = {
    "logits": "whole rows of logits; call it with logits or an LMHeadInput",
    "rows": "whole rows of logits; call it with logits or an LMHeadInput",
    "scalar": "a scalar head's output; call it with that",
}
_MASKS = {"token_mask": False, "response_mask": True}  # → whether rows are responses only
_PER_TOKEN = Field("")
_ADVICE = ("give all context ranks the counts of the whole step",)


@dataclass(frozen=True, eq=False)
class LogProbs(Source):
    """A host's log-probs and data, in any form; `host` holds the originals, `template` their first tensor."""

    call: LossCall
    host: HostLogProbs

    @classmethod
    def of(cls, loss: Loss, call: LossCall, host: HostLogProbs) -> LogProbs:
        """Take the log-probs of a call without reading values."""
        template = next(iter(_tensors(host.values)), torch.empty(0))
        return cls(loss, template, call, host)

    def needs(self) -> Requirements:
        names = ("token_mask" if name == "response_mask" else name for name in self.host.data)
        return self.loss.requirements.given(dict.fromkeys(names))

    def agreement(self, needs: Requirements, counts: dict[str, float]) -> Agreement:
        bounds, values = self.host.cu_seqlens, self.host.values
        if isinstance(bounds, Tensor) and bounds.dim() == 1:
            number = len(bounds) - 1
        else:
            number = len(values) if not isinstance(values, Tensor) or values.dim() > 1 else 0
        alike = Replicated(numbers=counts, advice=_ADVICE)
        return Agreement((self.call.context_group,), {"the number of sequences": number}, alike)

    def check_reads(self, needs: Requirements) -> None:
        loss, options, entropy = type(self.loss).__name__, self.loss.options, self.host.entropy
        if needs.reads != "log-probs":
            raise ValueError(f"{loss} reads more than log-probs: {_READS[needs.reads]}")
        check_declared(self.loss)
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
        read = needs.entropy and not needs.entropy_measured
        if read and entropy is None:
            raise ValueError(f"{loss} in this configuration reads the entropy of the policy; give entropy=")
        trained = read and needs.entropy_gradient and _has_gradient(self.host.values)
        if trained and entropy is not None and not _has_gradient(entropy):
            raise ValueError(
                f"entropy has no gradient, the log-probs have one, and {loss} in this configuration trains on both; "
                "compute the entropy with its gradient, too"
            )
        if needs.reads_places and group_size(self.call.context_group) > 1:
            raise ValueError(
                f"{loss} in this configuration needs each token's position in its sequence, which rows split over context "
                "ranks lack; gather the rows, and give no context_parallel_group"
            )

    def place(self, needs: Requirements) -> Placed:
        source, call = self.host, self.call
        rows, data = self._rows_and_data(needs)
        if needs.paired:
            check_pairs(rows.number)
        logprobs = rows.take(source.values)
        entropy = None if source.entropy is None else self._per_token("entropy", source.entropy, rows, _PER_TOKEN)
        layout = row_layout(logprobs, call.context_group)
        counted = data
        if "sample_mask" not in source.data:  # a host may drop a row by masking its tokens
            counted = {**data, "sample_mask": data["token_mask"].bool().any(1)}
        return Placed(data, needs.on_rows(), layout, counted, HostValues(rows, logprobs, entropy))

    def check_output(self, placed: Placed) -> None:
        values, data = placed.values, placed.data
        assert values is not None
        if not checks_values(data["token_mask"]):
            return
        if "token_mask" in self.host.data:
            self._check_first(values.rows, data["sample_mask"])
        check_log_probs(values.logprobs, valid_tokens(data, shift=False))

    def read(self, local: LocalBatch, placed: Placed) -> tuple[TokenBatch, Tensor | None]:
        values = placed.values
        assert values is not None
        flat = _masked(values.logprobs, local.mask)
        entropy = None if values.entropy is None else _masked(values.entropy, local.mask)
        return TokenBatch(local, ModelOutput(TokenStats(flat, entropy, torch.zeros_like(flat)))), None

    def _rows_and_data(self, needs: Requirements) -> tuple[Rows, dict[str, Tensor]]:
        """Convert a call's data to rows; ValueError for fields that are missing or unlike the log-probs."""
        source, call, template = self.host, self.call, self.template
        masks = [name for name in _MASKS if name in source.data]
        if len(masks) != 1:
            raise ValueError(
                "data must have one mask: token_mask, of whole sequences, or response_mask, of responses alone; it has "
                f"{' and '.join(masks) or 'neither'}"
            )
        [mask] = masks
        for name in (mask, "sample_mask"):
            for x in _tensors(source.data.get(name, ())):
                check_mask_dtype(name, x)
        check_plain("logprobs", template)
        if not template.is_floating_point() or template.dtype.itemsize < 2:
            raise ValueError(f"log-probs must be floating point of 16 bits or more, got {template.dtype}")
        if template.dtype.itemsize < 4:
            warn_of_precision(template.dtype)
        responses = _MASKS[mask]
        cut = Cut(responses, call.context_group, self.loss.options.cp_layout)
        rows = rows_of(source.values, cut, source.cu_seqlens)
        data: dict[str, Tensor] = {}
        for name in (mask, *needs.names):
            if name not in source.data:
                raise ValueError(f"data lacks the field {name!r}; this loss needs {', '.join((mask, *needs.asked))}")
            field, values = needs.field(name), source.data[name]
            if field.alignment == "predictor" and responses:
                raise ValueError(
                    f"{name} is stored at the position that predicts its token, which responses alone do not have"
                )
            if name in needs.names:
                for x in _tensors(values):
                    check_field(field, x)
            per_row = field.per == "sequence"
            in_rows = self._per_row(name, values, rows) if per_row else self._per_token(name, values, rows, field)
            data["token_mask" if name == mask else name] = in_rows
        if mask in needs.names:  # a component names it
            data[mask] = data["token_mask"]
        log_probs = source.values
        places = (
            torch.ones_like(log_probs) if isinstance(log_probs, Tensor) else [torch.ones_like(x) for x in log_probs]
        )
        data[IN_ROW] = rows.take(places).bool()
        ones = data["token_mask"].new_ones(rows.number)
        masked = source.data.get("sample_mask")
        data["sample_mask"] = ones if masked is None else self._per_row("sample_mask", masked, rows)
        return rows, data

    def _per_token(self, name: str, values: Values, rows: Rows, field: Field) -> Tensor:
        try:
            shape, wanted = rows.shape_of(values), rows.shape_of(self.host.values)
            if shape != wanted:
                raise ValueError(
                    f"has shape {_text(shape)}; the log-probs have {_text(wanted)}, and they must be alike"
                )
            for x in [values] if isinstance(values, Tensor) else values:
                if x.dim() != self.template.dim() + field.width:
                    raise ValueError(f"has shape {list(x.shape)}; the log-probs have {list(self.template.shape)}")
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        for x in _tensors(values):
            check_device(name, x, self.template)
        return rows.take(values, field.alignment)

    def _per_row(self, name: str, values: Values, rows: Rows) -> Tensor:
        if not isinstance(values, Tensor):
            raise ValueError(f"{name} must be a tensor [{rows.number}], got {type(values).__name__}")
        if values.shape != (rows.number,):
            raise ValueError(f"{name} has shape {list(values.shape)}; {rows.number} sequences call for [{rows.number}]")
        check_device(name, values, self.template)
        return values

    def _check_first(self, rows: Rows, sample_mask: Tensor) -> None:
        """Refuse a `token_mask` that counts a first token with a log-prob: the rows are then responses."""
        mask, logprobs = rows.first(self.host.data["token_mask"]), rows.first(self.host.values)
        counted = mask.bool() & sample_mask.bool() & logprobs.isfinite() & (logprobs != 0)
        if bool(counted.any()):
            row = int(counted.nonzero()[0, 0])
            raise ValueError(
                f"token_mask is 1 at [{row}, 0], a first token, which nothing predicts, and its log-prob is "
                f"{logprobs[row]:g}. Name the mask response_mask if rows are responses alone; set its column 0 to 0 if they "
                "are whole sequences"
            )


@cache
def warn_of_precision(dtype: torch.dtype) -> None:
    """Warn once a process of 16-bit log-probs."""
    warnings.warn(
        f"log-probs in {dtype} change the gradient by some percent; compute them in float32, from logits of any dtype",
        stacklevel=2,
    )


def _tensors(values: Values) -> list[Tensor]:
    return [x for x in ([values] if isinstance(values, Tensor) else values) if isinstance(x, Tensor)]


def _has_gradient(values: Values) -> bool:
    return any(x.requires_grad for x in _tensors(values))


def _masked(rows: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, rows.to(math_dtype(rows.dtype)).flatten(), 0)


def _text(shape: object) -> str:
    return str(list(shape)) if isinstance(shape, tuple) else str(shape)
