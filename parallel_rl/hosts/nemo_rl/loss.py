"""Any loss of this library in NeMo-RL (its source of August 2026); `parallel_rl.compat.nemo_rl` has NeMo-RL's own losses.

NeMo-RL's hidden factor: each context rank has whole log-probs and returns the whole loss, which NeMo-RL divides by cp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from parallel_rl.hosts.function_loss import FunctionLoss, named, row_logprobs
from parallel_rl.hosts.scaling import check_fits, divided_by, floats, unit_of
from parallel_rl.losses.core.base import LossFn
from parallel_rl.metrics import Metrics

_FIELDS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "rewards")


class HostLoss:
    """Loss in NeMo-RL's call on log-probs.

    >>> from parallel_rl import PolicyLossFn
    >>> loss_fn = HostLoss(PolicyLossFn({"aggregation": "seq-mean-token-mean"}))
    >>> loss_fn.loss_type, loss_fn.metric_normalizations["approx_kl"]
    ('sequence_level', 'tokens')

    `input_type` (log-probs), `loss_type` and `metric_normalizations` (what divides loss and metrics) are NeMo-RL's enum members
    where it is imported, else their values.

    Raises:
        ValueError: a loss that reads more than NeMo-RL's batch has, or is divided by neither tokens nor sequences; a NeMo-RL
            older than its call on log-probs (March 2026).
    """

    def __init__(self, loss_fn: LossFn) -> None:
        check_fits("NeMo-RL", loss_fn, _FIELDS)
        self.loss_fn = loss_fn
        unit, per = unit_of(loss_fn), divided_by(loss_fn)
        if unit is None:
            raise ValueError(
                f"{type(loss_fn).__name__} is divided by neither the step's tokens nor its sequences, or by both; NeMo-RL "
                "divides by one of them"
            )
        self.input_type = _member("LossInputType", "LOGPROB")
        self.loss_type = _member("LossType", "TOKEN_LEVEL" if unit == "tokens" else "SEQUENCE_LEVEL")
        divisors = {"tokens": "TOKENS", "sequences": "SEQUENCES", "pairs": "SEQUENCES"}
        self.metric_normalizations = {
            name: _member("MetricNormalizer", divisors.get(count or "", "NONE")) for name, count in per.items()
        }

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor | int | None,
        global_valid_toks: Tensor | int | None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the whole loss of the rows, divided by the step's counts, and its metrics; no count: 0.

        Ratios of sums are left out of the metrics, since NeMo-RL adds metrics up over micro-batches.

        Args:
            next_token_logprobs: [B, S − 1] (else ValueError), of input_ids[:, 1:], the same on every context rank.
            data: token_mask and fields [B, S], sample_mask [B]; column t is of token t.
            global_valid_seqs, global_valid_toks: of the step; None if the loss does not read it.
        """
        rows, width = data["token_mask"].shape
        if next_token_logprobs.shape != (rows, width - 1):
            raise ValueError(
                f"next_token_logprobs must be [B, S − 1] = [{rows}, {width - 1}] for token_mask {[rows, width]}, got "
                f"{list(next_token_logprobs.shape)}"
            )
        names = ("token_mask", "sample_mask", *self.loss_fn.requirements.names)
        seqs, toks = (
            torch.as_tensor(1 if n is None else n, device=next_token_logprobs.device).clamp(min=1)
            for n in (global_valid_seqs, global_valid_toks)
        )
        loss, metrics = self.loss_fn.from_logprobs(
            pad(next_token_logprobs, (1, 0)), data={name: data[name] for name in names if name in data},
            global_valid_seqs=seqs, global_valid_toks=toks,
        )  # fmt: skip
        summed = {name: metrics.parts(name) for name in metrics}
        return loss, floats(Metrics({name: part for name, part in summed.items() if part.denominator is None}))


def _member(kind: str, name: str) -> object:
    """Return NeMo-RL's member of an enumeration, or its value if NeMo-RL is not imported."""
    host = sys.modules.get("nemo_rl.algorithms.loss.interfaces")
    if host is None:
        if "nemo_rl" in sys.modules and "nemo_rl.algorithms.loss_functions" in sys.modules:
            raise ValueError(
                "this NeMo-RL passes logits to its losses, which is not supported here. Install its source since March 2026, "
                "which has nemo_rl.algorithms.loss, or take the losses of parallel_rl.compat.nemo_rl"
            )
        return name.lower()
    members = getattr(host, kind, None)  # MetricNormalizer is younger than the call: 0.7 lacks it
    return name.lower() if members is None else getattr(members, name)


def nemo_rl(loss: Callable[..., tuple], fields: tuple[str, ...] = ()) -> FunctionLoss:
    """Adapt a NeMo-RL loss: (next_token_logprobs, data, valid_seqs, valid_toks) → (loss, metrics).

    next_token_logprobs [B, S − 1]; `data` has the masks, input_ids and `fields`, 0 outside the loss tokens. Left out are
    metrics with _min or _max in their names, which NeMo-RL does not sum, and the factors of Megatron and context ranks, which
    it undoes.

    >>> def loss(next_token_logprobs, data, global_valid_seqs, global_valid_toks):
    ...     return -next_token_logprobs.sum() / global_valid_toks, {}
    >>> nemo_rl(loss).name
    'loss'
    """

    def run(
        logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor
    ) -> tuple[Tensor, Mapping[str, float]]:
        logprobs, mask = row_logprobs(logits, data)
        fields_of_call = {name: torch.where(mask, data[name], 0) for name in ("input_ids", *fields)}
        fields_of_call |= {"token_mask": mask.to(logits), "sample_mask": data["sample_mask"].to(logits)}
        value, metrics = loss(
            next_token_logprobs=logprobs[:, 1:], data=fields_of_call, global_valid_seqs=seqs, global_valid_toks=toks
        )
        return value, {name: x for name, x in metrics.items() if not ("_min" in name or "_max" in name)}

    return named(loss, run, fields)


def through(loss_fn: LossFn) -> FunctionLoss:
    """Run a loss of this library in the framework's call, as a subject of the law."""
    return nemo_rl(HostLoss(loss_fn), loss_fn.requirements.names)
