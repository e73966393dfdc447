"""KL estimators per token, by value and by gradient."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.objectives.ratio import MAX_EXPONENT

KLType = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Tensor,
    reference: Tensor,
    kind: KLType = "k3",
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """An estimate of KL(π ‖ π_ref) from samples of π, per token.

    With d = log π_ref − log π:  k1 = −d;  k2 = d²/2;  k3 = e^d − 1 − d. The weight multiplies the value before the
    output clamp and keeps its gradient, the score-function term: with weight exp(l − sg[l]) the gradient of k3 per
    token is (log π − log π_ref)·∇log π, the gradient of the true KL, which that of k3 alone is not. Where the input
    clamp bites, both gradients vanish.

    Args:
        logprobs, reference: one shape.
        input_clamp: bound on |d| before the exponential; None is off.
        output_clamp: bound on the absolute estimate; None is off.
        weight: importance weight of the sample, same shape.

    Papers: http://joschu.net/blog/kl-approx.html (estimators), arXiv 2506.09477 (gradients).
    """
    d = reference - logprobs
    if input_clamp is not None:
        if weight is not None:
            weight = torch.where(d.detach().abs() > input_clamp, weight.detach(), weight)
        d = d.clamp(-input_clamp, input_clamp)
    # An infinite estimate would turn the zero gradients of the clamp below, and of the weight, into NaN.
    capped = d.clamp(max=MAX_EXPONENT)
    kl = -d if kind == "k1" else d.square() / 2 if kind == "k2" else capped.expm1() - capped
    if weight is not None:
        kl = weight * kl
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def jensen_shannon_estimate(logprobs: Tensor, other: Tensor) -> Tensor:
    """½·k3(p ‖ m) + ½·k3(q ‖ m) of two log-probs of one token, m their mean probability; a per-token mismatch measure ≥ 0."""
    mixture = torch.logaddexp(logprobs, other) - math.log(2)
    return (kl_estimate(logprobs, mixture) + kl_estimate(other, mixture)) / 2
