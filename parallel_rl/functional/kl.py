"""KL estimators per token, by value and by gradient.

With d = log π_ref − log π and samples of π, an estimate k in a loss gives the gradient Σ (weight·dk/dl + k·dweight/dl)·∇l:

    estimator   value            weight      coefficient of ∇l    expected gradient
    k1          −d               none        1                    0: no regularisation at all
    k2          d²/2             none        −d                   ∇KL(π ‖ π_ref)
    k3          e^d − 1 − d      none        1 − e^d              ∇KL(π_ref ‖ π), the other direction
    abs         |d|              none        −sign d              ∇ of the total log-ratio, no KL
    low_var_kl  k3, clamped      none        1 − e^d, 0 clamped   as k3
    any k       k                e^{l−sg l}  k + dk/dl            ∇ E[k]; for k1 and k3 that is ∇KL(π ‖ π_ref)
    any k       k                π/π_old     weight·(k + dk/dl)   the same for samples of π_old: "corrected k3" with k3
    any k       straight-through none        −d                   value of k, gradient of k2

The coefficient of k3 with a weight is exactly −d, that of k2.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.functional.ratio import MAX_EXPONENT

KLType = Literal["k1", "k2", "k3", "abs", "low_var_kl"]


def kl_estimate(
    logprobs: Tensor,
    reference: Tensor,
    kind: KLType = "k3",
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Estimate KL(π ‖ π_ref) from samples of π, per token.

    With d = log π_ref − log π: k1 = −d, k2 = d²/2, k3 = e^d − 1 − d, "abs" = |d|; "low_var_kl" is k3 with d clamped to ±20 and
    the estimate to ±10. The module's table has their gradients. If d is infinite, or k3's e^d exceeds e^80, estimate and
    gradient are 0. Papers: http://joschu.net/blog/kl-approx.html (estimators), arXiv 2506.09477 (gradients).

    >>> kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]), "k2")
    tensor([0.0000, 0.5000])

    Args:
        logprobs, reference: one shape.
        input_clamp, output_clamp: bounds on |d| before the exponential (no gradient beyond), and on |estimate|; None is off.
        weight: importance weight of the sample, same shape, applied before the output clamp; it keeps its gradient.
    """
    return kl_with_overflow(
        logprobs, reference, kind, input_clamp=input_clamp, output_clamp=output_clamp, weight=weight
    )[0]


def kl_with_overflow(
    logprobs: Tensor,
    reference: Tensor,
    kind: KLType = "k3",
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: Tensor | None = None,
    gradient_of_k2: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `kl_estimate`, and bool where it overflows and is 0 (None if the input clamp bounds it).

    With `gradient_of_k2` the value is that of `kind` and the gradient that of k2 (straight-through).

    >>> kl_with_overflow(torch.tensor([-1.0, -1.0, -100.0]), torch.tensor([-2.0, -torch.inf, -1.0]))
    (tensor([0.3679, 0.0000, 0.0000]), tensor([False,  True,  True]))
    """
    overflow, slope = None, None
    if gradient_of_k2:
        slope = kl_estimate(logprobs, reference, "k2", input_clamp=input_clamp, output_clamp=output_clamp)
    if kind == "low_var_kl":
        kind, input_clamp, output_clamp = "k3", 20.0, 10.0
    d = reference - logprobs
    if input_clamp is not None:
        if weight is not None:
            weight = torch.where(d.detach().abs() > input_clamp, weight.detach(), weight)
        d = d.clamp(-input_clamp, input_clamp)
    if input_clamp is None or input_clamp > MAX_EXPONENT:
        overflow = (d > MAX_EXPONENT) | d.isneginf() if kind == "k3" else d.isinf()
        d = d.masked_fill(overflow, 0)
    kl = {
        "k1": lambda: -d,
        "k2": lambda: d.square() / 2,
        "k3": lambda: d.expm1() - d,
        "abs": lambda: d.abs(),
    }[kind]()
    if weight is not None:
        kl = weight * kl
    kl = kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)
    if slope is not None:
        kl = straight_through(kl, slope if overflow is None else slope.masked_fill(overflow, 0))
    return kl, overflow


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """Combine the value of one estimate with the gradient of another of the same shape.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> y = straight_through(x.square(), 10 * x)
    >>> y.item(), torch.autograd.grad(y, x)[0].item()
    (9.0, 10.0)
    """
    return value.detach() + gradient - gradient.detach()


def jensen_shannon_estimate(logprobs: Tensor, other: Tensor) -> Tensor:
    """Estimate the Jensen-Shannon divergence per token, ½·k3(p ‖ m) + ½·k3(q ‖ m), m the mean probability.

    >>> jensen_shannon_estimate(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]))
    tensor([0.0000, 0.1514])
    """
    mixture = torch.logaddexp(logprobs, other) - math.log(2)
    return (kl_estimate(logprobs, mixture) + kl_estimate(other, mixture)) / 2
