"""NeMo-RL's terms for a loss: the unit of its mean, its input, the divisors of metrics, the fields of its data."""

from __future__ import annotations

import enum
import sys
from typing import TypedDict

from torch import Tensor


class _Word(enum.Enum):
    """Enumeration whose members equal the origin's of the same name, so its code knows our losses."""

    def __eq__(self, other: object) -> bool:
        return (type(self).__name__, self.value) == (type(other).__name__, getattr(other, "value", None))

    def __hash__(self) -> int:
        return hash(self.name)


class LossType(_Word):
    """Unit that a loss is averaged over."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(_Word):
    """Input of a loss, which `prepare_loss_input` makes of logits."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DRAFT = "draft"


class MetricNormalizer(_Word):
    """Divisor of a metric: global_valid_toks, global_valid_seqs, or none (counts, extrema, local means)."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


def normalizers() -> tuple[MetricNormalizer, MetricNormalizer, MetricNormalizer]:
    """Return tokens, sequences, none: NeMo-RL's members if it is loaded, as it compares by identity."""
    host = sys.modules.get("nemo_rl.algorithms.loss.interfaces")
    tokens, sequences, none = getattr(host, "MetricNormalizer", MetricNormalizer)
    return tokens, sequences, none


class LossFunction:
    """Base of the losses: `loss, metrics = loss_fn(output, data, global_valid_seqs, global_valid_toks)`."""

    loss_type: LossType
    input_type: LossInputType


class PreferenceLossDataDict(TypedDict):
    """Data of pairs of rows, chosen even and rejected odd: [2P, S] and sample_mask [2P]."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DPOLossDataDict(PreferenceLossDataDict):
    """Data of `DPOLossFn`; reference_policy_logprobs [2P, S]: column t is of token t + 1."""

    reference_policy_logprobs: Tensor


class ClippedPGLossDataDict(TypedDict):
    """Data of `ClippedPGLossFn`: [B, S], column t is of token t; sample_mask [B]."""

    input_ids: Tensor
    advantages: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DistillationLossDataDict(TypedDict):
    """Data of `DistillationLossFn`; teacher_topk_logits, teacher_topk_indices: [B, S, K] at the predictor."""

    input_ids: Tensor
    input_lengths: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor
