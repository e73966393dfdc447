"""Denominators and token weights that depend on what off-policy corrections leave of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_rl.counts import ValidCounts, token_weights, unit_of
from parallel_rl.losses.core.aggregation import UNIT_FIELDS, aggregation_weights, count_units, unit_weights
from parallel_rl.losses.core.measures import count_true
from parallel_rl.losses.off_policy import importance_weight, kept_of_step, kept_tokens, rejection_samples
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.policy_config import PolicyLossConfig


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
