"""Metrics of a batch: token means as parts of their rank, sequence counts on context rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch

from parallel_rl.metrics import Mean, Measure, Metric, MinMax, Sum

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.losses.core.batch import TokenBatch


def token_means(batch: TokenBatch, values: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Average name → [T_local] over all valid tokens of the step, summed together."""
    if not values:
        return {}
    stacked = torch.stack(list(values.values())).detach().to(batch.output.dtype)
    means = batch.local.masked(stacked, batch.output.dtype).sum(-1, dtype=torch.float64) / batch.counts.toks
    per = batch.local.token_unit
    return {name: Metric("share", mean, per=per) for name, mean in zip(values, means.unbind(), strict=True)}


def token_ranges(batch: TokenBatch, values: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Return minimum and maximum of name → [T_local] over valid tokens, as `name_min` and `name_max`."""
    return _ranges(values, batch.mask) if values else {}


def sequence_mean(
    batch: TokenBatch,
    x: Tensor,
    mask: Tensor | None = None,
    count: Tensor | None = None,
    per: str | None = "sequences",
) -> Metric:
    """Average [B] over the step's valid sequences, or other entries by their mask, global count and unit."""
    mask = batch.sequence_mask if mask is None else mask
    count = batch.counts.seqs if count is None else count
    total = torch.where(mask, x.detach(), 0).sum(dtype=torch.float64) / count
    return Metric("share", batch.local.once(total, of_tokens=False), per=per)


def count_true(batch: TokenBatch, mask: Tensor) -> Metric:
    """Count true entries in [B], or in whole data [B, S], over the step."""
    return Metric("count", batch.local.once(mask.sum(dtype=torch.float64), of_tokens=mask.dim() == 2))


def overflow_tokens(batch: TokenBatch, overflows: Sequence[Tensor | None]) -> dict[str, Metric]:
    """Count tokens [T_local] that overflow (`functional.ratio`); a None of `overflows` cannot."""
    counted = [overflow for overflow in overflows if overflow is not None]
    if not counted:
        return {}
    return {"overflow_tokens": Metric("count", reduce(or_, counted).sum(dtype=torch.float64))}


def measured_tokens(batch: TokenBatch, measures: Mapping[str, Measure]) -> dict[str, Metric]:
    means = {name: measure.values for name, measure in measures.items() if isinstance(measure, Mean)}
    metrics = token_means(batch, means)
    for name, measure in measures.items():
        if isinstance(measure, MinMax):
            metrics |= token_ranges(batch, {name: measure.values})
        elif isinstance(measure, Sum):
            total = torch.where(batch.mask, measure.values.detach(), 0).sum(dtype=torch.float64)
            metrics[name] = Metric("share", total)
    return metrics


def measured_entries(
    batch: TokenBatch, measures: Mapping[str, Measure], mask: Tensor, number: Tensor, per: str
) -> dict[str, Metric]:
    """Make metrics of one value per sequence or pair (`per`), by valid entries `mask` and global `number`."""
    metrics: dict[str, Metric] = {}
    for name, measure in measures.items():
        x = measure.values
        if isinstance(measure, MinMax):
            metrics |= _ranges({name: x}, mask)
        else:
            mean = isinstance(measure, Mean)
            count = number if mean else torch.ones_like(number)
            metrics[name] = sequence_mean(batch, x, mask, count, per if mean else None)
    return metrics


def _ranges(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    stacked = torch.stack([x.detach() for x in values.values()])
    if not stacked.shape[1]:  # a rank without a row
        least, most = (stacked.new_full((len(values),), nothing) for nothing in (torch.inf, -torch.inf))
    else:
        least = torch.where(mask, stacked, torch.inf).amin(1)
        most = torch.where(mask, stacked, -torch.inf).amax(1)
    metrics = {f"{name}_min": Metric("min", x) for name, x in zip(values, least.unbind(), strict=True)}
    return metrics | {f"{name}_max": Metric("max", x) for name, x in zip(values, most.unbind(), strict=True)}
