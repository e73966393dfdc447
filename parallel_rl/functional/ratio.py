"""Likelihood ratios, and the surrogates that PPO and CISPO make of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# e^80 is finite in float32 and beyond any ratio that means something; inf · 0 would be NaN.
MAX_EXPONENT = 80.0


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp(x) for x ≤ 80, the constant e^80 (gradient 0) above.

    >>> safe_exp(torch.tensor([0.0, 80.0, 1000.0]))
    tensor([1.0000e+00, 5.5406e+34, 5.5406e+34])
    """
    return log_ratio.clamp(max=MAX_EXPONENT).exp()


def exp_or_zero(log_weight: Tensor) -> Tensor:
    """exp(x), and 0 with gradient 0 where that is not finite.

    >>> exp_or_zero(torch.tensor([0.0, 1000.0, torch.nan]))
    tensor([1., 0., 0.])
    """
    finite = log_weight.detach() < math.log(torch.finfo(log_weight.dtype).max) - 1e-4  # false for NaN
    return torch.where(finite, log_weight, -torch.inf).exp()


def clipped_surrogate(ratio: Tensor, clipped: Tensor, advantages: Tensor, dual_clip: float | None = None) -> Tensor:
    """PPO's pessimistic surrogate, per token: max(−A·ρ, −A·ρ_clipped); with dual clip c at most −A·c where A < 0.

    All tensors have one shape. Papers: PPO arXiv 1707.06347; dual clip arXiv 1912.09729.

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
    """CISPO, per token: −A·sg[ρ_clipped]·log π, so that clipped tokens keep a gradient. Paper: arXiv 2506.13585.

    >>> cispo(torch.tensor([-2.0]), torch.tensor([1.2]), torch.tensor([0.5]))
    tensor([1.2000])
    """
    return -advantages * clipped.detach() * logprobs
