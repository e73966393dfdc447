"""Losses of supervised fine-tuning, one number per token."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

NLLWeighting = Literal["none", "probability", "phi"]


def weighted_nll(logprobs: Tensor, weighting: NLLWeighting = "none", cutoff_prob: float = 1.0) -> Tensor:
    """Compute the negative log-likelihood times a constant weight of p = e^l; same shape.

        none         −l                             SFT
        probability  −sg[p]·l                       SFT-IS: the gradient of −p, maximum expected accuracy (arXiv 2508.05629)
        phi          −sg[p·(1 − p)]·min(l, log c)   SFT-phi: neither certain tokens nor those out of reach (2508.11408)

    >>> logprobs = torch.tensor([0.5, 0.9]).log()
    >>> weighted_nll(logprobs, "phi")
    tensor([0.1733, 0.0095])

    Args:
        logprobs: any shape, ≤ 0.
        cutoff_prob: c of phi; likelier tokens have a value and no gradient. 1 is off.
    """
    if weighting == "none":
        return -logprobs
    p = logprobs.detach().exp()
    if weighting == "probability":
        return -p * logprobs
    capped = logprobs if cutoff_prob == 1 else torch.clamp(logprobs, max=math.log(cutoff_prob))
    return -p * -logprobs.detach().expm1() * capped
