"""Divergences of a teacher p and a student q, as terms of a sum over the vocabulary."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_rl.config.strict import Variants

LOG_INFINITESIMAL = -100.0  # replaces log 0 in a KL: one forbidden token must not make the loss infinite
_LOWEST = -1e30  # finite, so that 0 · _LOWEST is 0


class Divergence(Variants):
    """D(p, q) = Σ_v value_v, with its gradient in closed form.

    With g_v = q_v·∂D/∂q_v the gradient on q's logits is g_v − q_v·Σ_u g_u; a part c·q_v of g cancels.
    """

    @abstractmethod
    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Return (value, g), shaped like the log-probs, which may be −inf; the value is differentiable."""


@dataclass(frozen=True)
class ForwardKL(Divergence, name="forward_kl"):
    """Σ p·(log p − log q), gradient q − p on logits; log q = −100 if only the student excludes a token."""

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        p = log_p.exp()
        return p * (_finite(log_p) - _finite(log_q)), -_possible(p, log_q)


@dataclass(frozen=True)
class CrossEntropy(Divergence, name="cross_entropy"):
    """−Σ p·log q: forward KL plus the teacher's entropy, with the same gradient."""

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        p = log_p.exp()
        return -p * _finite(log_q), -_possible(p, log_q)


@dataclass(frozen=True)
class FiniteCrossEntropy(Divergence, name="finite_cross_entropy"):
    """−Σ p·log q over tokens that the student allows; ignores other teacher mass (as MiniLLM)."""

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        p = _possible(log_p.exp(), log_q)
        return -p * _finite(log_q), -p


@dataclass(frozen=True)
class ReverseKL(Divergence, name="reverse_kl"):
    """Σ q·(log q − log p); log p = −100 if only the teacher excludes a token. Paper: arXiv 2306.08543."""

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        value = log_q.exp() * (_finite(log_q) - _finite(log_p))
        return value, value


@dataclass(frozen=True)
class JSD(Divergence, name="jsd"):
    """β·KL(p ‖ M) + (1 − β)·KL(q ‖ M), M = β·p + (1 − β)·q; at β = 0 forward KL, at β = 1 reverse KL.

    These ends are the limits of JSD/β and JSD/(1 − β), as in GKD (arXiv 2306.13649).

    beta: β.
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta = {self.beta} must lie in [0, 1]; 0 is forward KL, 1 is reverse KL")

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        if self.beta in (0, 1):
            return (ReverseKL() if self.beta else ForwardKL()).terms(log_p, log_q)
        log_p, log_q, log_m = _mixture(log_p, log_q, self.beta)
        of_q = (1 - self.beta) * log_q.exp() * (log_q - log_m)
        return self.beta * log_p.exp() * (log_p - log_m) + of_q, of_q


@dataclass(frozen=True)
class SkewForwardKL(Divergence, name="skew_forward_kl"):
    """KL(p ‖ α·p + (1 − α)·q): forward KL that stays below −log α.

    alpha: α. Paper: DistiLLM, arXiv 2402.03898.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _check_alpha(self.alpha, "forward_kl")

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        log_p, log_q, log_m = _mixture(log_p, log_q, self.alpha)
        return log_p.exp() * (log_p - log_m), -(1 - self.alpha) * (log_p + log_q - log_m).exp()


@dataclass(frozen=True)
class SkewReverseKL(Divergence, name="skew_reverse_kl"):
    """KL(q ‖ α·q + (1 − α)·p): reverse KL that stays below −log α.

    alpha: α. Paper: DistiLLM, arXiv 2402.03898.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _check_alpha(self.alpha, "reverse_kl")

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        log_p, log_q, log_m = _mixture(log_p, log_q, 1 - self.alpha)
        value = log_q.exp() * (log_q - log_m)
        return value, value - self.alpha * (2 * log_q - log_m).exp()


def mixed_kl(log_p: Tensor, log_q: Tensor, forward_weight: float) -> Tensor:
    """Mix both directions: w·KL(p ‖ q) + (1 − w)·KL(q ‖ p) over the last dimension, differentiable.

    >>> p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    >>> mixed_kl(p, q, forward_weight=1.0)
    tensor(0.1438)

    Args:
        log_p, log_q: [..., K], not necessarily of probabilities that sum to 1.
        forward_weight: w.
    """
    kl = torch.zeros_like(log_q)
    if forward_weight > 0:
        kl = kl + forward_weight * ForwardKL().terms(log_p, log_q)[0]
    if forward_weight < 1:
        kl = kl + (1 - forward_weight) * ReverseKL().terms(log_p, log_q)[0]
    return kl.sum(-1)


def with_tail(log_probs: Tensor) -> Tensor:
    """Append the log-prob of all other tokens together (at least the dtype's ε): [..., K] to [..., K + 1].

    >>> with_tail(torch.tensor([0.5, 0.2]).log()).exp()
    tensor([0.5000, 0.2000, 0.3000])
    """
    total = log_probs.logsumexp(-1, keepdim=True)
    rest = -total.clamp(max=-torch.finfo(total.dtype).eps).expm1()
    return torch.cat([log_probs, rest.log()], -1)


def reverse_tail(log_q: Tensor, entropy: Tensor) -> Tensor:
    """Compute the reverse KL outside the top-k, Σ q·(log q + 100), [...]: the teacher's log p is −100.

    >>> q = torch.tensor([0.5, 0.3, 0.2])
    >>> reverse_tail(q[:2].log(), -(q * q.log()).sum())  # 0.2·(log 0.2 + 100)
    tensor(19.6781)

    Args:
        log_q: [..., K] the student's log-probs inside the top-k. entropy: [...] of the student's full distribution.
    """
    q = log_q.exp()
    inside = (q * _finite(log_q)).sum(-1)
    return -entropy - inside - LOG_INFINITESIMAL * (1 - q.sum(-1))


def _finite(log_x: Tensor) -> Tensor:
    return torch.where(log_x == -torch.inf, LOG_INFINITESIMAL, log_x)


def _possible(p: Tensor, log_q: Tensor) -> Tensor:
    return torch.where(log_q == -torch.inf, 0, p)  # the loss is constant where the student excludes a token


def _mixture(log_p: Tensor, log_q: Tensor, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    log_p, log_q = log_p.clamp(min=_LOWEST), log_q.clamp(min=_LOWEST)
    return log_p, log_q, torch.logaddexp(log_p + math.log(weight), log_q + math.log1p(-weight))


def _check_alpha(alpha: float, plain: str) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha = {alpha} must lie in (0, 1); without a mixture choose {plain!r}")
