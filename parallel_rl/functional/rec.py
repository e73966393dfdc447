"""REC: REINFORCE with PPO's clip, importance weight and regulariser as separate options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.ratio import safe_exp
from parallel_rl.functional.surrogate import Clipped, PolicyTerms, Surrogate


@dataclass(frozen=True)
class REC(Surrogate, name="rec"):
    """x = −A'·l·I + regulariser, with constant weight and indicator.

    clip_mode: I is 1 (none); 1 − ε_low ≤ ρ ≤ 1 + ε_high (two-side); ρ ≤ 1 + ε_high if A ≥ 0, ρ ≥ 1 − ε_low if A ≤ 0
        (one-side; gspo-one-side uses the sequence's geometric mean ratio); two-side, or ρ ≤ 1 − ε_low' if A ≥ 0, or ρ ≥ 1 +
        ε_high' if A ≤ 0 (ring).
    weight: A' is A; A·ρ (importance_sampling); A times the geometric mean ratio (gspo_importance_sampling);
        A·e^{A/temperature} (advantage).
    regularizer: + coef·(l − l_old)² (k2), or − coef·l (forward-kl). regularizer_coef: coef of the regulariser.
    epsilon_low, epsilon_high, epsilon_low_prime, epsilon_high_prime: the bounds; the primes are of "ring". temperature: divides
        A in the weight "advantage".

    ρ is of single tokens and detached. Paper: arXiv 2509.24203.
    """

    token_level = True
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    epsilon_low_prime: float = 0.6
    epsilon_high_prime: float = 2.0
    clip_mode: Literal["none", "one-side", "gspo-one-side", "two-side", "ring"] = "none"
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none"
    regularizer: Literal["none", "k2", "forward-kl"] = "none"
    regularizer_coef: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "epsilon_low", "epsilon_high", "epsilon_low_prime", "epsilon_high_prime", "temperature")
        positive(self, "regularizer_coef", zero=True)
        if (self.regularizer == "none") != (self.regularizer_coef == 0):
            raise ValueError(
                f"regularizer_coef = {self.regularizer_coef} with regularizer = {self.regularizer!r}: give both or none"
            )

    @property
    def token_separable(self) -> bool:  # type: ignore[override]
        return self.clip_mode != "gspo-one-side" and self.weight != "gspo_importance_sampling"

    def __call__(self, terms: PolicyTerms) -> Tensor:
        log_ratio = terms.token_log_ratio.detach()
        ratio = safe_exp(log_ratio)
        advantages, keep = self._weighted(terms, ratio), self.keep(terms)
        loss = torch.where(keep, -advantages * terms.logprobs, 0)
        if self.regularizer == "k2":
            return loss + self.regularizer_coef * terms.token_log_ratio.square()
        return loss - self.regularizer_coef * terms.logprobs

    def _weighted(self, terms: PolicyTerms, ratio: Tensor) -> Tensor:
        if self.weight == "importance_sampling":
            return terms.advantages * ratio
        if self.weight == "gspo_importance_sampling":
            return terms.advantages * safe_exp(terms.sequence_mean(terms.token_log_ratio.detach()))
        if self.weight == "advantage":
            return terms.advantages * safe_exp(terms.advantages / self.temperature)
        return terms.advantages

    def clipped(self, terms: PolicyTerms) -> Clipped | None:
        if self.clip_mode == "none":
            return None
        ratio = self._clip_ratio(terms)
        held_back = ~self._keep(ratio, terms.advantages)
        return Clipped(ratio < 1 - self.epsilon_low, ratio > 1 + self.epsilon_high, held_back)

    def _clip_ratio(self, terms: PolicyTerms) -> Tensor:
        log_ratio = terms.token_log_ratio.detach()
        return safe_exp(terms.sequence_mean(log_ratio) if self.clip_mode == "gspo-one-side" else log_ratio)

    def keep(self, terms: PolicyTerms) -> Tensor:
        """Return I of each token, bool."""
        if self.clip_mode == "none":
            return torch.ones_like(terms.logprobs, dtype=torch.bool)
        return self._keep(self._clip_ratio(terms), terms.advantages)

    def _keep(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        up, down = advantages >= 0, advantages <= 0
        below, above = ratio <= 1 + self.epsilon_high, ratio >= 1 - self.epsilon_low
        if self.clip_mode in ("one-side", "gspo-one-side"):
            return (up & below) | (down & above)
        inside = below & above
        if self.clip_mode == "two-side":
            return inside
        return inside | (up & (ratio <= 1 - self.epsilon_low_prime)) | (down & (ratio >= 1 + self.epsilon_high_prime))
