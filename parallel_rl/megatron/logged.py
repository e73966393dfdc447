"""Metrics as the training loops of Megatron-LM and Megatron-Bridge log them."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_rl.groups import ParallelGroups
from parallel_rl.metrics import Metrics

_SUMMED = ("share", "count", "ratio")


def numerator_denominator(
    metrics: Metrics, num_microbatches: int, *, groups: ParallelGroups | None = None
) -> dict[str, Tensor]:
    """Turn a micro-batch's metrics into a loss callback's dict for `train_step`: name → [2] float64.

        logged = Σ numerator / Σ denominator    over micro-batches, data and context ranks

    `train_step` under `pretrain()` sums pairs and divides, so the log has the global batch's numbers: denominators of a sum
    over the step add up to 1. Extrema and ratios of squares have no such pairs and are left out (see `reduce_metrics`).

    >>> counts = count_valid(data)
    >>> loss_func = megatron_loss_func(NLLLoss(), data, *counts, config=config, num_microbatches=1)
    >>> *_, report = loss_func(torch.zeros(2, 4, 8))
    >>> numerator_denominator(report["metrics"], num_microbatches=1)["loss"]  # log 8
    tensor([2.0794, 1.0000], dtype=torch.float64)

    Args:
        metrics: `report["metrics"]` of the callback that `megatron_loss_func` makes.
        num_microbatches: of the step, the same on every data rank; at least 1, else ValueError.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches = {num_microbatches} must be at least 1")
    where = groups or ParallelGroups.from_megatron()
    parts = num_microbatches * where.dp_size * where.cp_size
    pairs = {}
    for name in metrics:
        part = metrics.parts(name)
        if part.kind in _SUMMED:
            value = part.value.to(torch.float64)
            denominator = torch.full_like(value, 1 / parts) if part.denominator is None else part.denominator.to(value)
            pairs[name] = torch.stack([value, denominator])
    return pairs
