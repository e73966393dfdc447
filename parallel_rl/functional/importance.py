"""Importance weights against the mismatch of sampler and trainer, and their truncations."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Truncation = Literal["tis", "icepop", "seq-mask-tis"]


def out_of_bounds(weight: Tensor, low: float, high: float) -> Tensor:
    """Mark the weights outside [low, high]; bool, same shape.

    >>> out_of_bounds(torch.tensor([0.4, 1.0, 2.5]), 0.5, 2.0)
    tensor([ True, False,  True])
    """
    return (weight < low) | (weight > high)


def truncated(weight: Tensor, kind: Literal["tis", "icepop"], low: float, high: float) -> Tensor:
    """Truncate weights: tis clamps into [low, high], icepop sets 0 outside of it; same shape.

    >>> truncated(torch.tensor([0.4, 1.0, 2.5]), "tis", 0.0, 2.0)
    tensor([0.4000, 1.0000, 2.0000])
    >>> truncated(torch.tensor([0.4, 1.0, 2.5]), "icepop", 0.5, 2.0)
    tensor([0., 1., 0.])
    """
    if kind == "tis":
        return weight.clamp(low, high)
    return torch.where(out_of_bounds(weight, low, high), 0, weight)


MismatchStatistic = Literal["k1", "k2", "k3"]


def mismatch(log_weight: Tensor, statistic: MismatchStatistic) -> Tensor:
    """Distance of trainer and sampler on each token, from a = log π_prev − log π_generation, clamped to ±20; same shape.

    k1 = a (its bounds are those of the ratio π_prev/π_generation), k2 = a²/2, k3 = e^a − 1 − a.

    >>> mismatch(torch.tensor([0.0, 1.0]), "k2")
    tensor([0.0000, 0.5000])
    """
    a = log_weight.clamp(-20, 20)
    return a if statistic == "k1" else a.square() / 2 if statistic == "k2" else a.expm1() - a
