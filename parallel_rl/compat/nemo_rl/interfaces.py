"""NeMo-RL's words for a loss: what it is averaged over, what it reads, what divides a metric, and the fields of its data."""

from __future__ import annotations

import enum
import sys
from typing import TypedDict

from torch import Tensor


class _Word(enum.Enum):
    """A member equals the origin's own one of its name and value, so that its code knows our losses by theirs."""

    def __eq__(self, other: object) -> bool:
        return (type(self).__name__, self.value) == (type(other).__name__, getattr(other, "value", None))

    def __hash__(self) -> int:
        return hash(self.name)


class LossType(_Word):
    """The unit that a loss is averaged over."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(_Word):
    """Input of a loss, which `prepare_loss_input` makes of logits."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DRAFT = "draft"


class MetricNormalizer(_Word):
    """Divisor of a metric: global_valid_toks, global_valid_seqs, or nothing (counts, extrema, local means)."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


def normalizers() -> tuple[MetricNormalizer, MetricNormalizer, MetricNormalizer]:
    """Tokens, sequences, none: NeMo-RL's own members where this process runs it, whose trainer compares them by identity."""
    host = sys.modules.get("nemo_rl.algorithms.loss.interfaces")
    tokens, sequences, none = getattr(host, "MetricNormalizer", MetricNormalizer)
    return tokens, sequences, none


class LossFunction:
    """Base of the losses: `loss, metrics = loss_fn(model output, data, global_valid_seqs, global_valid_toks)`."""

    loss_type: LossType
    input_type: LossInputType


class PreferenceLossDataDict(TypedDict):
    """Data of pairs of rows, chosen even and rejected odd: [2P, S] and sample_mask [2P]."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DPOLossDataDict(PreferenceLossDataDict):
    """Data of `DPOLossFn`: reference_policy_logprobs [2P, S] stand at the predictor, column t is of token t + 1."""

    reference_policy_logprobs: Tensor


class ClippedPGLossDataDict(TypedDict):
    """Data of `ClippedPGLossFn`: [B, S] and token-aligned, column t describes token t; sample_mask [B]."""

    input_ids: Tensor
    advantages: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DistillationLossDataDict(TypedDict):
    """Data of `DistillationLossFn`: teacher_topk_logits and teacher_topk_indices [B, S, K] stand at the predictor."""

    input_ids: Tensor
    input_lengths: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor
