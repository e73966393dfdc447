"""Likelihood ratios, and the surrogates of PPO and CISPO."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Bound of a log-ratio: e^80, even times an advantage, is finite in float32, and e^88.7 is not. A ratio above e^80 comes from a
#: wrong recorded log-prob, so its token leaves the loss: value and gradient 0, counted in `overflow_tokens`.
MAX_EXPONENT = 80.0


def safe_exp(log_ratio: Tensor) -> Tensor:
    """Compute exp(x) for x ≤ 80, the constant e^80 (gradient 0) above.

    >>> safe_exp(torch.tensor([0.0, 80.0, 1000.0]))
    tensor([1.0000e+00, 5.5406e+34, 5.5406e+34])
    """
    return log_ratio.clamp(max=MAX_EXPONENT).exp()


def exp_or_zero(log_weight: Tensor) -> Tensor:
    """Compute exp(x); value and gradient are 0 where it is not finite.

    >>> exp_or_zero(torch.tensor([0.0, 1000.0, torch.nan]))
    tensor([1., 0., 0.])
    """
    finite = log_weight.detach() < math.log(torch.finfo(log_weight.dtype).max) - 1e-4  # false for NaN
    return torch.where(finite, log_weight, -torch.inf).exp()


def bounded_log_ratio(logprobs: Tensor, recorded: Tensor, clamp: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute log π − log π_recorded, and bool where it exceeds 80: value and gradient are 0 there.

    With `clamp` ≤ 80 only infinite log-ratios become 0; the others are clamped to ±`clamp`.

    >>> bounded_log_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -200.0]))
    (tensor([1., 0.]), tensor([False,  True]))
    """
    log_ratio = logprobs - recorded
    clamped = clamp is not None and clamp <= MAX_EXPONENT
    overflow = log_ratio > (torch.finfo(log_ratio.dtype).max if clamped else MAX_EXPONENT)
    log_ratio = log_ratio.masked_fill(overflow, 0)
    return log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp), overflow


def finite_log_ratio(logprobs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log π − log π_ref, and bool where it is infinite: value and gradient are 0 there.

    >>> finite_log_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -torch.inf]))
    (tensor([1., 0.]), tensor([False,  True]))
    """
    log_ratio = logprobs - reference
    infinite = log_ratio.isinf()
    return log_ratio.masked_fill(infinite, 0), infinite


def clipped_surrogate(ratio: Tensor, clipped: Tensor, advantages: Tensor, dual_clip: float | None = None) -> Tensor:
    """Compute PPO's surrogate per token: max(−A·ρ, −A·ρ_clipped); at most −A·c (dual clip) if A < 0.

    Papers: PPO arXiv 1707.06347; dual clip arXiv 1912.09729.

    >>> ratio, advantages = torch.tensor([0.5, 1.0, 1.5]), torch.tensor([1.0, 1.0, 1.0])
    >>> clipped_surrogate(ratio, ratio.clamp(0.8, 1.2), advantages)
    tensor([-0.5000, -1.0000, -1.2000])
    """
    costs = -advantages
    loss = torch.maximum(costs * ratio, costs * clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, costs * dual_clip), loss)


def cispo(logprobs: Tensor, clipped: Tensor, advantages: Tensor) -> Tensor:
    """Compute CISPO: −A·sg[ρ_clipped]·log π; clipped tokens keep a gradient. Paper: arXiv 2506.13585.

    >>> cispo(torch.tensor([-2.0]), torch.tensor([1.2]), torch.tensor([0.5]))
    tensor([1.2000])
    """
    return -advantages * clipped.detach() * logprobs
