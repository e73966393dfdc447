"""Importance weights against the mismatch of sampler and trainer, and their truncations."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Truncation = Literal["tis", "icepop", "seq-mask-tis"]


def out_of_bounds(weight: Tensor, low: float, high: float) -> Tensor:
    """Bool, same shape: where a weight lies outside [low, high]."""
    return (weight < low) | (weight > high)


def truncated(weight: Tensor, kind: Literal["tis", "icepop"], low: float, high: float) -> Tensor:
    """tis clamps a weight into [low, high]; icepop takes 0 outside of it. Same shape."""
    if kind == "tis":
        return weight.clamp(low, high)
    return torch.where(out_of_bounds(weight, low, high), 0, weight)


MismatchStatistic = Literal["k1", "k2", "k3"]


def mismatch(log_weight: Tensor, statistic: MismatchStatistic) -> Tensor:
    """How far trainer and sampler are apart on a token, from a = log π_prev − log π_generation, clamped to ±20.

    k1 = a (its bounds are those of the ratio π_prev/π_generation), k2 = a²/2, k3 = e^a − 1 − a.
    """
    a = log_weight.clamp(-20, 20)
    return a if statistic == "k1" else a.square() / 2 if statistic == "k2" else a.expm1() - a
