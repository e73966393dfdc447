"""Weights of tokens in a loss: by the units of an aggregation, and by the field `token_weights`.

Each turn, prompt or trajectory of the step weighs the same:

    L = 1/N_units · Σ_units (Σ tokens of the unit ℓ) / (valid tokens of the unit)

Rows of a prompt or trajectory may lie on several data ranks and micro-batches, so `count` gathers (id, tokens) of each row over
the step; tokens are those of the data, or those that a rejection keeps. A masked row belongs to no unit; a row with an empty
token mask does, because it is one of the N_seq sequences.

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

from parallel_rl.counts import Aggregation, ValidCounts, WeightedBy, token_weights
from parallel_rl.losses.core.requirements import WEIGHTS, Field, Requirements
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.core.local_batch import LocalBatch

#: fields whose ids name the units of an aggregation
UNIT_FIELDS: dict[Aggregation, Field] = {
    "turn-mean": Field("segment_ids", dtype="integer"),
    "prompt-mean": Field("group_ids", per="sequence", dtype="integer"),
    "trajectory-mean": Field("run_ids", per="sequence", dtype="integer"),
}


def aggregate(batch: TokenBatch, x: Tensor, aggregation: Aggregation, max_length: int | None = None) -> Tensor:
    """Aggregate [T_local] values into this rank's local loss, or [K, T_local] into K local losses."""
    return batch.token_sum(x, aggregation_weights(batch, aggregation, max_length))


def aggregation_weights(batch: TokenBatch, aggregation: Aggregation, max_length: int | None = None) -> Tensor:
    """Return [T_local] float64 token weights, see `parallel_rl.counts.token_weights` and the module."""
    if aggregation in UNIT_FIELDS:
        return unit_weights(batch, aggregation)
    sizes, counts = batch.local.divisors
    return batch.expand(token_weights(aggregation, sizes, counts, max_length))


def with_units(needs: Requirements, aggregation: Aggregation, weights: WeightedBy | None = None) -> Requirements:
    """Add to the requirements what an aggregation by units and token weights read and count."""
    if weights is not None:
        needs = replace(needs, fields=(*needs.fields, WEIGHTS), counted=True, token_weights=weights)
    if aggregation not in UNIT_FIELDS:
        return needs
    field = UNIT_FIELDS[aggregation]
    fields = needs.fields if field.name in needs.names else (*needs.fields, field)
    return replace(needs, fields=fields, counted=True, units=aggregation)


def count_units(batch: TokenBatch, aggregation: Aggregation | None, kept: Tensor | None = None) -> Statistics:
    """Count the micro-batch's units (other aggregations: none); `kept` [T_local] restricts the tokens."""
    if aggregation == "turn-mean":
        first = batch.local.turn_starts
        if kept is not None:
            first = first & (batch.turn_sum(kept.double()) > 0)
        return Statistics({"turns": first.sum()})
    if aggregation not in UNIT_FIELDS:
        return Statistics({})
    tokens, rows = batch.local.tokens_per_sequence, batch.sequence_mask
    if kept is not None:
        tokens = batch.segment_sum(kept.double()).to(torch.int64)
        rows = tokens > 0
    ids = batch.local.data[UNIT_FIELDS[aggregation].name]
    records = {"unit_ids": torch.where(rows, ids, -1), "unit_tokens": torch.where(rows, tokens, 0)}
    return Statistics({}, records=records)


def unit_weights(batch: TokenBatch, aggregation: Aggregation, kept: Tensor | None = None) -> Tensor:
    """Return [T_local] float64 1/(N_units · tokens of the token's unit); args as in `count_units`."""
    if aggregation == "turn-mean":
        tokens = batch.local.turns.tokens if kept is None else batch.turn_sum(kept.double())
        return 1 / (batch.statistics["turns"].clamp(min=1) * tokens.clamp(min=1).double())
    records, name = batch.statistics.records, UNIT_FIELDS[aggregation].name
    if "unit_ids" not in records:
        raise ValueError(
            f"statistics have no {name}: they are of another loss or configuration; pass what this loss's `count` returned"
        )
    ids, order = records["unit_ids"].sort()
    summed = torch.nn.functional.pad(records["unit_tokens"][order].cumsum(0), (1, 0))
    first = torch.nn.functional.pad(ids.diff(), (min(len(ids), 1), 0), value=1) != 0
    number = (first & (ids >= 0)).sum()
    mine = batch.local.data[name].to(torch.int64).contiguous()
    first, last = torch.searchsorted(ids, mine), torch.searchsorted(ids, mine, right=True)
    if kept is None and checks_values(mine):
        _check_counted(name, mine, batch.sequence_mask & (first == last))
    tokens = summed[last] - summed[first]
    return batch.expand(1 / (number.clamp(min=1) * tokens.clamp(min=1)).double())


def _check_counted(name: str, ids: Tensor, missing: Tensor) -> None:
    if bool(missing.any()):
        row = int(missing.nonzero()[0])
        raise ValueError(
            f"{name} = {int(ids[row])} at [{row}] is not among the units of the statistics; count(...) takes every "
            "micro-batch of the step"
        )


def check_unit_ids(name: str, ids: Tensor, sample_mask: Tensor) -> None:
    wrong = sample_mask.bool() & (ids < 0)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name} is {int(ids[row])} at [{row}], a valid row; ids are at least 0, a row of no unit has sample_mask 0"
        )


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
