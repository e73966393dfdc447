"""Off-policy corrections without gradient: importance weights, rejection, masks, and the counts they leave."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.counts import ValidCounts, token_weights, unit_of
from parallel_rl.functional.importance import mismatch, out_of_bounds, step_bound, truncated
from parallel_rl.functional.ratio import exp_or_zero
from parallel_rl.functional.surrogate import driven_out
from parallel_rl.losses.core.aggregation import UNIT_FIELDS, aggregation_weights, count_units, unit_weights
from parallel_rl.losses.core.batch import PoolLevel, TokenBatch
from parallel_rl.losses.core.measures import count_true, sequence_mean
from parallel_rl.losses.off_policy_config import ImportanceConfig, OffPolicyMaskConfig, RejectionConfig, RejectionRule
from parallel_rl.metrics import Metric
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from parallel_rl.losses.policy_config import PolicyLossConfig


@torch.no_grad()
def importance_weight(batch: TokenBatch, prev: Tensor, config: ImportanceConfig) -> tuple[Tensor, dict[str, Metric]]:
    """Compute ω [T_local] after truncation, and its metrics; float64 if `normalize` follows."""
    # float64: a weight beyond float32 is large, and is truncated or divided as such
    log_weight, by_sequence = prev.double() - batch.recorded("generation_logprobs"), config.level.startswith("sequence")
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
    weight = weight if config.normalize else representable(weight, batch.output.dtype)
    metrics["sampling_importance_ratio"] = sequence_mean(batch, weight) if by_sequence else batch.token_mean(weight)
    return batch.expand(weight) if by_sequence else weight, metrics


def representable(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a weight to `dtype`, 0 where that cannot hold it."""
    weight = weight.to(dtype)
    return torch.where(weight.isfinite(), weight, 0)


@torch.no_grad()
def passed_rules(batch: TokenBatch, prev: Tensor, config: RejectionConfig) -> dict[str, Tensor]:
    """Return the tokens [T_local] that pass each rule, by its words; step-level rules read its samples."""
    passed = _passed_locally(batch, prev, config)
    for name, rule in config.of_step.items():
        if name not in (samples := batch.statistics.samples):
            raise ValueError(
                f"statistics hold the samples {sorted(samples)}, not {name!r}: they are of another loss or configuration; "
                "pass what this loss's `collect` returned"
            )
        value, bound = _of_step(batch, prev, rule), step_bound(samples[name], rule.high)
        passed[rule.words] = value.isnan() | (value < bound)
    return passed


@torch.no_grad()
def kept_tokens(batch: TokenBatch, prev: Tensor, config: RejectionConfig) -> Tensor:
    """Return [T_local] bool: valid tokens that pass every rule except the step-level ones."""
    return reduce(and_, _passed_locally(batch, prev, config).values(), batch.mask)


@torch.no_grad()
def rejection_samples(batch: TokenBatch, prev: Tensor, config: RejectionConfig) -> dict[str, Tensor]:
    """Collect inputs of the step-level rules, [T_local] each, and whether the other rules keep each token."""
    samples = {name: _of_step(batch, prev, rule) for name, rule in config.of_step.items()}
    if samples and config.denominator == "kept":
        samples["rejection_rest"] = torch.where(batch.mask, kept_tokens(batch, prev, config).double(), torch.nan)
    return samples


def kept_of_step(samples: Mapping[str, Tensor], config: RejectionConfig) -> Tensor:
    """Count the step's tokens that pass every rule, from its samples; 0-dim."""
    kept = samples["rejection_rest"] == 1
    for name, rule in config.of_step.items():
        values = samples[name]
        kept = kept & (values.isnan() | (values < step_bound(values, rule.high)))
    return kept.sum()


def _passed_locally(batch: TokenBatch, prev: Tensor, config: RejectionConfig) -> dict[str, Tensor]:
    return {rule.words: _passes(batch, prev, rule, rule.level) for rule in config.rules if rule.level != "step"}


def _passes(batch: TokenBatch, prev: Tensor, rule: RejectionRule, level: PoolLevel) -> Tensor:
    # as recorded: `count` must keep the same tokens as the loss, for any dtype of the logits
    logprobs, generation = prev.double(), batch.recorded("generation_logprobs")
    statistic = batch.pooled(mismatch(logprobs, generation, rule.statistic), level)
    low, high = rule.bounds
    if not rule.signed:
        return (statistic >= low) & (statistic <= high)
    up, down = batch["advantages"] > 0, batch["advantages"] < 0
    if rule.statistic == "k1":
        return torch.where(up, statistic <= high, torch.where(down, statistic >= low, True))
    side = batch.pooled(logprobs - generation, level)
    return (statistic <= high) | ~driven_out(side < 0, side > 0, batch["advantages"])


def _of_step(batch: TokenBatch, prev: Tensor, rule: RejectionRule) -> Tensor:
    logprobs, generation = prev.double(), batch.recorded("generation_logprobs")
    concerned = batch.mask
    if rule.signed:
        side = logprobs - generation
        concerned = concerned & driven_out(side < 0, side > 0, batch["advantages"])
    return torch.where(concerned, mismatch(logprobs, generation, rule.statistic), torch.nan)


@torch.no_grad()
def off_policy_keep(batch: TokenBatch, log_ratio: Tensor, config: OffPolicyMaskConfig) -> Tensor:
    """Return [T_local] bool: false where A < 0 and the sequence's mean drift exceeds delta."""
    drift = -log_ratio if config.behaviour == "prev" else batch["generation_logprobs"] - batch.logprobs
    return ~((batch["advantages"] < 0) & (batch.expand(batch.segment_mean(drift)) > config.delta))


def entropy_threshold(samples: Tensor, fraction: float) -> Tensor:
    """Return the (1 − fraction) quantile of the step's entropies, interpolated; NaN does not count."""
    if not samples.numel():  # a step without a row
        return samples.new_tensor(torch.nan)
    ordered = samples.sort().values  # NaN last
    count = (~samples.isnan()).sum()
    place = (count - 1).clamp(min=0).double() * (1 - fraction)
    below = place.floor().long()
    ends = ordered.gather(0, torch.stack([below, torch.minimum(below + 1, (count - 1).clamp(min=0))]))
    return torch.lerp(ends[0], ends[1], place - below)


def count_survivors(batch: TokenBatch, prev: Tensor, config: PolicyLossConfig) -> Statistics:
    """Count what corrections leave, if denominators need it, and collect samples of step-level rules."""
    sums, samples, units, rejection = {}, {}, Statistics({}), config.rejection
    if config.importance is not None and config.importance.normalize:
        weight, _ = importance_weight(batch, prev, config.importance)
        sums["importance_sum"] = batch.token_mean(weight).value * batch.counts.toks
    if rejection is not None and rejection.of_step:
        samples = rejection_samples(batch, prev, rejection)
    elif rejection is not None and config.counts_kept:
        kept = kept_tokens(batch, prev, rejection)
        rows = batch.segment_sum(kept.double())
        sums["kept_tokens"] = count_true(batch, rows).value
        sums["kept_sequences"] = count_true(batch, rows > 0).value
        units = count_units(batch, config.aggregation, kept)
    return Statistics(sums, samples) | units


def policy_weights(batch: TokenBatch, kept: Tensor, config: PolicyLossConfig) -> Tensor:
    """Return [T_local] token weights by the counts of all valid tokens, or of those `kept`."""
    rejection = config.rejection
    if rejection is None or not config.counts_kept:
        return aggregation_weights(batch, config.aggregation, config.max_length)
    if config.aggregation in UNIT_FIELDS:
        return unit_weights(batch, config.aggregation, kept)
    statistics = batch.statistics
    if rejection.of_step:
        number = batch.counts.seqs, kept_of_step(statistics.samples, rejection)
    else:
        number = statistics["kept_sequences"], statistics["kept_tokens"]
    counts = ValidCounts(*(n.clamp(min=1) for n in number))
    rows = batch.segment_sum(kept.to(batch.output.dtype))
    return batch.expand(token_weights(config.aggregation, rows, counts, config.max_length))


def policy_unit(config: PolicyLossConfig) -> str | None:
    """Return the unit by whose count `policy_weights` divides."""
    if config.rejection is None or not config.counts_kept:
        return unit_of(config.aggregation, config.token_weights)
    return f"kept {unit_of(config.aggregation)}"
