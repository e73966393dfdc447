"""Which gradient each KL estimator gives: every word of a small vocabulary, weighed by its probability."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_rl.functional.kl import kl_estimate, straight_through
from parallel_rl.functional.ratio import exp_or_zero

V = 6


def setting() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy, log-probs of the reference and of an older policy."""
    g = torch.Generator().manual_seed(0)
    z, ref, old = (torch.randn(V, generator=g, dtype=torch.float64) for _ in range(3))
    return z.requires_grad_(), ref.log_softmax(0), (z.detach() + 0.2 * old).log_softmax(0)


def exact(kind: str) -> Tensor:
    """∇ of a divergence, by autograd on the whole distribution."""
    z, ref, _ = setting()
    logp = z.log_softmax(0)
    value = {
        "zero": 0.0 * z.sum(),
        "reverse": (logp.exp() * (logp - ref)).sum(),
        "forward": (ref.exp() * (ref - logp)).sum(),
        "log-ratio": (logp.detach().exp() * (logp - ref).abs()).sum(),
    }[kind]
    (gradient,) = torch.autograd.grad(value, z)
    return gradient


def expected(kind: str, gradient: str) -> tuple[Tensor, Tensor]:
    """(value, gradient) in expectation over the sampler's distribution."""
    z, ref, old = setting()
    logp = z.log_softmax(0)
    sampler, weight = logp.detach().exp(), None
    if gradient == "score-function":
        weight = exp_or_zero(logp - logp.detach())
    elif gradient == "old":
        sampler, weight = old.exp(), (logp - old).exp()
    k = kl_estimate(logp, ref, kind, weight=weight)  # type: ignore[arg-type]
    if gradient == "straight-through":
        k = straight_through(k, kl_estimate(logp, ref, "k2"))
    value = (sampler * k).sum()
    (found,) = torch.autograd.grad(value, z)
    return value.detach(), found


TABLE = [
    ("k1", "plain", "zero"),
    ("k2", "plain", "reverse"),
    ("k3", "plain", "forward"),
    ("low_var_kl", "plain", "forward"),
    ("abs", "plain", "log-ratio"),
    ("k1", "score-function", "reverse"),
    ("k3", "score-function", "reverse"),
    ("k1", "old", "reverse"),
    ("k3", "old", "reverse"),
    ("k1", "straight-through", "reverse"),
    ("k3", "straight-through", "reverse"),
    ("abs", "straight-through", "reverse"),
]


@pytest.mark.parametrize(("kind", "gradient", "divergence"), TABLE)
def test_expected_gradient(kind: str, gradient: str, divergence: str) -> None:
    _, found = expected(kind, gradient)
    torch.testing.assert_close(found, exact(divergence), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
@pytest.mark.parametrize("gradient", ["plain", "score-function", "straight-through", "old"])
def test_expected_value_is_the_kl(kind: str, gradient: str) -> None:
    z, ref, _ = setting()
    logp = z.detach().log_softmax(0)
    value, _ = expected(kind, gradient)
    torch.testing.assert_close(value, (logp.exp() * (logp - ref)).sum(), rtol=1e-12, atol=0)


def test_weighted_k3_has_the_coefficient_of_k2_on_every_word() -> None:
    z, ref, _ = setting()
    logp = z.detach().log_softmax(0).requires_grad_()
    weighted = kl_estimate(logp, ref, "k3", weight=exp_or_zero(logp - logp.detach()))
    for estimate in (weighted, kl_estimate(logp, ref, "k2")):
        (coefficient,) = torch.autograd.grad(estimate.sum(), logp)
        torch.testing.assert_close(coefficient, (logp - ref).detach(), rtol=1e-12, atol=1e-15)


def test_low_variance_is_clamped() -> None:
    logp = torch.tensor([-30.0, -1.0, -5.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.5, -1.0], dtype=torch.float64)
    estimate = kl_estimate(logp, ref, "low_var_kl")
    estimate.sum().backward()
    assert estimate[0] == 10
    assert logp.grad is not None
    assert logp.grad[0] == 0
    assert estimate[2] == 10
    assert logp.grad[1].item() == pytest.approx(1 - math.exp(-0.5), abs=1e-12)
