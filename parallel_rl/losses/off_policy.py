"""Off-policy corrections: importance weights, rejection, masking; all without gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallel_rl.functional.importance import mismatch, out_of_bounds, truncated
from parallel_rl.functional.ratio import exp_or_zero
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import sequence_mean
from parallel_rl.losses.policy_config import ImportanceConfig, OffPolicyMaskConfig, RejectionConfig, RejectionRule
from parallel_rl.metrics import Metric


@torch.no_grad()
def importance_weight(batch: TokenBatch, prev: Tensor, config: ImportanceConfig) -> tuple[Tensor, dict[str, Metric]]:
    """ω [T_local] after truncation, and its metrics."""
    # In float64: a weight that only float32 cannot hold is large, and is truncated as such.
    log_weight, by_sequence = prev.double() - batch["generation_logprobs"], config.level.startswith("sequence")
    if by_sequence:
        log_weight = (batch.segment_mean if config.level == "sequence-mean" else batch.segment_sum)(log_weight)
    else:
        log_weight = batch.pooled(log_weight, config.level)
    weight, low, high = exp_or_zero(log_weight), config.low, config.high
    metrics = {}
    if config.mode == "seq-mask-tis":
        finite = torch.where(log_weight.isfinite(), log_weight, 0)
        dropped = out_of_bounds(batch.segment_mean(finite).exp(), low, high)
        metrics["is_oob_ratio"] = sequence_mean(batch, dropped)
        weight = torch.where(batch.expand(dropped), 0, weight)
    elif config.mode != "none":
        outside = out_of_bounds(weight, low, high)
        metrics["is_oob_ratio"] = batch.token_mean(batch.expand(outside) if by_sequence else outside)
        weight = truncated(weight, config.mode, low, high)
    weight = weight.to(prev.dtype)
    weight = torch.where(weight.isfinite(), weight, 0)
    metrics["sampling_importance_ratio"] = sequence_mean(batch, weight) if by_sequence else batch.token_mean(weight)
    return batch.expand(weight) if by_sequence else weight, metrics


@torch.no_grad()
def kept_tokens(batch: TokenBatch, prev: Tensor, config: RejectionConfig) -> Tensor:
    """[T_local] bool: valid tokens that pass every rule."""
    # In float64: `count` must find the very tokens that the loss does, whatever the dtype of the logits.
    log_weight = prev.double() - batch["generation_logprobs"]
    keep = batch.mask
    for rule in config.rules:
        keep = keep & _passes(batch, log_weight, rule)
    return keep


def _passes(batch: TokenBatch, log_weight: Tensor, rule: RejectionRule) -> Tensor:
    statistic = batch.pooled(mismatch(log_weight, rule.statistic), rule.level)
    low, high = rule.low, rule.high
    if rule.statistic == "k1":  # bounds on the ratio itself
        low, high = -math.inf if low == 0 else math.log(low), math.log(high)
    return (statistic >= low) & (statistic <= high)


@torch.no_grad()
def off_policy_keep(batch: TokenBatch, log_ratio: Tensor, config: OffPolicyMaskConfig) -> Tensor:
    """[T_local] bool: false where A < 0 in a sequence that has drifted by more than delta.

    Args:
        log_ratio: [T_local] l − l_prev of each token, clamped where that of the surrogate is.
    """
    drift = -log_ratio if config.behaviour == "prev" else batch["generation_logprobs"] - batch.logprobs
    return ~((batch["advantages"] < 0) & (batch.expand(batch.segment_mean(drift)) > config.delta))


def entropy_threshold(samples: Tensor, fraction: float) -> Tensor:
    """The (1 − fraction) quantile of the step's entropies, linear between the two nearest; NaN samples do not count."""
    if not samples.numel():  # a step without a row
        return samples.new_tensor(torch.nan)
    ordered = samples.sort().values  # NaN last
    count = (~samples.isnan()).sum()
    place = (count - 1).clamp(min=0).double() * (1 - fraction)
    below = place.floor().long()
    ends = ordered.gather(0, torch.stack([below, torch.minimum(below + 1, (count - 1).clamp(min=0))]))
    return torch.lerp(ends[0], ends[1], place - below)
