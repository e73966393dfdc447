"""DPPO: a trust region of probabilities in place of ratios, and its divergences of a sampled token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.surrogate import Clipped, PolicyTerms, Surrogate, driven_out

FLOOR = 1e-8  # added to 1 − p, which may round to 0; as in verl and SkyRL


def probability_difference(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """Compute e^l − e^l_b, the signed total variation of "this token or another"; same shape.

    >>> probability_difference(torch.tensor([0.5, 0.1]).log(), torch.tensor([0.2, 0.3]).log())
    tensor([ 0.3000, -0.2000])
    """
    return logprobs.exp() - behaviour.exp()


def binary_kl(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """Compute KL(behaviour ‖ policy) of "this token or another" from the token's log-probs, same shape:
    q·(log q − log p) + (1 − q)·log((1 − q + ε) / (1 − p + ε)), p = e^l, q = e^l_b, ε = 1e-8.

    >>> binary_kl(torch.tensor([0.5, 0.1]).log(), torch.tensor([0.2, 0.1]).log())
    tensor([0.1927, 0.0000])
    """
    q, log_ratio = behaviour.exp(), behaviour - logprobs
    other_p, other_q = (-x.clamp(max=0).expm1() for x in (logprobs, behaviour))
    rest = other_q * ((other_q + FLOOR).log() - (other_p + FLOOR).log())
    return torch.where(q > 0, q * log_ratio, 0) + rest


@dataclass(frozen=True)
class DPPO(Surrogate, name="dppo"):
    """PPO with a trust region of probabilities, as ratios are tight for rare tokens: x = −A·ρ·1[kept].

    A token is above the region if p > p_old and its divergence exceeds high, below it if p < p_old and the divergence exceeds
    low. It is kept unless A drives it further out: above with A > 0, below with A < 0.

    divergence: tv, |p − p_old|, or binary_kl, KL(π_old ‖ π) of "this token or another" in nats. low, high: its bounds (0.2 for
        tv, 0.05 for binary_kl). ratio_max: cap on ρ (verl: 20); None is off. detached: x = −A·sg[min(ρ, ratio_max)]·l·1[kept]
        (verl): the gradient continues beyond ratio_max. signed: false drops tokens outside the region for any A
        (prime-rl's IPO). Paper: arXiv 2602.04879.
    """

    token_level = True
    divergence: Literal["tv", "binary_kl"] = "tv"
    low: float = 0.2
    high: float = 0.2
    ratio_max: float | None = None
    detached: bool = False
    signed: bool = True

    def __post_init__(self) -> None:
        positive(self, "low", "high", below=1 if self.divergence == "tv" else None)
        if self.ratio_max is not None and not self.ratio_max > 1:
            raise ValueError(f"ratio_max = {self.ratio_max} must exceed 1, or be None for no cap")

    def __call__(self, terms: PolicyTerms) -> Tensor:
        ratio = terms.ratio if self.ratio_max is None else terms.ratio.clamp(max=self.ratio_max)
        loss = -terms.advantages * (ratio.detach() * terms.logprobs if self.detached else ratio)
        return torch.where(self._region(terms).bites, 0, loss)

    def clipped(self, terms: PolicyTerms) -> Clipped:
        region = self._region(terms)
        capped = None if self.ratio_max is None else (terms.ratio > self.ratio_max) & ~region.bites
        return region._replace(dual=capped)

    def _region(self, terms: PolicyTerms) -> Clipped:
        logprobs, old = terms.logprobs.detach(), terms.old_logprobs
        moved = probability_difference(logprobs, old)
        if self.divergence == "tv":
            low, high = moved < -self.low, moved > self.high
        else:
            kl = binary_kl(logprobs, old)
            low, high = (moved < 0) & (kl > self.low), (moved > 0) & (kl > self.high)
        return Clipped(low, high, driven_out(low, high, terms.advantages) if self.signed else low | high)
