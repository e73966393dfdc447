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
