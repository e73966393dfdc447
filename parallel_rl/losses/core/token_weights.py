"""Weights of single tokens, a field of the data.

A token's terms are multiplied by its weight w ≥ 0. A weight of 0 masks the token like a token_mask of 0: it leaves the loss,
its counts and its metrics. The loss is divided by one of:

    "count"  the number of tokens with w > 0: a weight of 2 pulls twice as hard (prime-rl's components, ms-swift's loss_scale)
    "sum"    Σ w: a weighted mean, in which weights matter relative to each other (torch's cross-entropy)

Aggregation "token-sum" divides by nothing: Σ w·ℓ (Tinker's per-token weights). Metrics are means over tokens with w > 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from parallel_rl.counts import ValidCounts
from parallel_rl.losses.core.requirements import WEIGHTS
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.losses.core.local_batch import LocalBatch


def weighted(local: LocalBatch) -> LocalBatch:
    """Return the batch with weights and without tokens of weight 0, which the counts omit, too."""
    weights = torch.where(local.valid, local.data[WEIGHTS.name], 0).double()
    counts, statistics = local.counts, local.statistics
    if statistics is not None and local.requirements.counted and len(statistics):
        counts = ValidCounts(counts.seqs, statistics["weighted_tokens"].clamp(min=1))
    return replace(local, data={**local.data, "token_mask": weights > 0}, counts=counts, weights=weights)


def count_weights(local: LocalBatch) -> Statistics:
    """Count what a weighted micro-batch adds to the step's weighted tokens and sum of weights."""
    assert local.weights is not None
    return Statistics({"weighted_tokens": local.valid.sum(), "weight_sum": local.weights.sum()})


def check_token_weights(weights: Tensor, valid: Tensor) -> None:
    """Raise ValueError for a negative or infinite weight at a valid place."""
    wrong = valid & ((weights < 0) | ~weights.isfinite())
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{WEIGHTS.name} = {weights[tuple(place)]:g} at {place} must be finite and at least 0; 0 masks"
        )
