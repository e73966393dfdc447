"""Importance weights against the mismatch of sampler and trainer, and their truncations."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from parallel_rl.functional.dppo import binary_kl, probability_difference
from parallel_rl.segments import running_sum

Truncation = Literal["tis", "icepop", "seq-mask-tis"]


def out_of_bounds(weight: Tensor, low: float, high: float) -> Tensor:
    """Mark the weights outside [low, high]; bool, same shape.

    >>> out_of_bounds(torch.tensor([0.4, 1.0, 2.5]), 0.5, 2.0)
    tensor([ True, False,  True])
    """
    return (weight < low) | (weight > high)


def truncated(weight: Tensor, kind: Literal["tis", "icepop"], low: float, high: float) -> Tensor:
    """Truncate weights: tis clamps to [low, high], icepop sets 0 outside; same shape.

    >>> truncated(torch.tensor([0.4, 1.0, 2.5]), "tis", 0.0, 2.0)
    tensor([0.4000, 1.0000, 2.0000])
    >>> truncated(torch.tensor([0.4, 1.0, 2.5]), "icepop", 0.5, 2.0)
    tensor([0., 1., 0.])
    """
    if kind == "tis":
        return weight.clamp(low, high)
    return torch.where(out_of_bounds(weight, low, high), 0, weight)


MismatchStatistic = Literal["k1", "k2", "k3", "tv", "binary_kl"]


def mismatch(prev: Tensor, generation: Tensor, statistic: MismatchStatistic) -> Tensor:
    """Measure the distance of trainer and sampler per token, from both log-probs; same shape.

    With a = prev − generation, clamped to ±20: k1 = a (its bounds are on e^a), k2 = a²/2, k3 = e^a − 1 − a; tv = |π_prev −
    π_generation|; binary_kl: see `binary_kl`.

    >>> mismatch(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]), "k2")
    tensor([0.0000, 0.5000])
    """
    if statistic == "tv":
        return probability_difference(prev, generation).abs()
    if statistic == "binary_kl":
        return binary_kl(prev, generation)
    a = (prev - generation).clamp(-20, 20)
    return a if statistic == "k1" else a.square() / 2 if statistic == "k2" else a.expm1() - a


def step_bound(samples: Tensor, most: float) -> Tensor:
    """Return the bound (0-dim) that keeps as many samples below it as a mean of at most `most` allows.

    Equal samples leave together; −inf if all leave, inf if none. NaN samples do not count.

    >>> step_bound(torch.tensor([0.1, 3.0, 0.3, torch.nan, 0.5]), 0.25)
    tensor(0.4000)
    """
    ordered = torch.where(samples.isnan(), torch.inf, samples).sort().values
    number = torch.arange(1, len(ordered) + 1, device=samples.device)
    stay = (running_sum(ordered) / number <= most).sum().view(1)
    padded = torch.cat([ordered.new_full((1,), -torch.inf), ordered, ordered.new_full((1,), torch.inf)])
    # midway between the last sample below and the first above, so that rounding moves none across
    return ((padded.gather(0, stay) + padded.gather(0, stay + 1)) / 2)[0]
