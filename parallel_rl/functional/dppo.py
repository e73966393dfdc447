"""Surrogates that limit tokens by probability (DPPO), covariance with the advantage (Clip-Cov, KL-Cov) or ratio (REC)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.ratio import clipped_surrogate, safe_exp
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
    """PPO whose trust region bounds probabilities instead of ratios: x = −A·ρ·1[kept].

    A token is above the region if p > p_old and its divergence exceeds high, below it if p < p_old and the divergence exceeds
    low. It is kept unless A drives it further out: above with A > 0, below with A < 0.

    divergence: tv, |p − p_old|, or binary_kl, KL(π_old ‖ π) of "this token or another" in nats. low: bound on the divergence
        where π < π_old (0.2 for tv, 0.05 for binary_kl). high: bound on the divergence where π > π_old. ratio_max: cap on ρ
        (verl: 20); None is off. detached: x = −A·sg[min(ρ, ratio_max)]·l·1[kept] (verl): the gradient continues beyond
        ratio_max.
    signed: false drops tokens outside the region for any A (prime-rl's IPO). Paper: arXiv 2602.04879.
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


def _covariance(terms: PolicyTerms) -> tuple[Tensor, Tensor]:
    """Compute (A − mean A)·(l − mean l) for local tokens and for all of the step (NaN if masked)."""
    advantages, all_advantages = _centred(terms.advantages.double(), terms.samples["advantages"])
    logprobs, all_logprobs = _centred(terms.logprobs.detach().double(), terms.samples["logprobs"])
    return advantages * logprobs, all_advantages * all_logprobs


def _centred(x: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the samples' mean from both; exactly 0 if all samples are equal."""
    mean, masked = samples.nanmean(), samples.isnan()
    if not samples.numel():
        return x - mean, samples - mean
    equal = torch.where(masked, torch.inf, samples).amin() == torch.where(masked, -torch.inf, samples).amax()
    return torch.where(equal, 0, x - mean), torch.where(equal & ~masked, 0, samples - mean)


def _count(samples: Tensor, fraction: float) -> Tensor:
    return ((~samples.isnan()).sum().double() * fraction).floor().clamp(min=1).long()


def _kth_largest(values: Tensor, k: Tensor) -> Tensor:
    if not values.numel():
        return values.new_tensor(torch.inf)
    return values.sort(descending=True).values.gather(0, (k - 1).clamp(0, values.numel() - 1).view(1))[0]


@dataclass(frozen=True)
class ClipCov(Surrogate, name="clip_cov"):
    """PPO's surrogate with the loss of a few high-covariance tokens set to 0.

    Among the step's valid tokens with covariance in (low, high) that PPO does not clip, (seed, `sample_ids`, position) selects
    max(⌊fraction·N⌋, 1), the same on any layout.

    clip_low: PPO's ε below 1. clip_high: PPO's ε above 1. fraction: fraction of the step's valid tokens. low: lower bound of
    the covariance, excluded. high: upper bound of the covariance, excluded. seed: seed of the choice. Paper: arXiv 2505.22617.
    """

    needs_statistics = True
    token_level = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, "clip_low", "clip_high", zero=True)
        positive(self, "fraction")
        if not self.low < self.high or self.fraction > 1:
            raise ValueError(
                f"low = {self.low} must be below high = {self.high}, and fraction = {self.fraction} at most 1"
            )

    @property
    def draw_seed(self) -> int:
        return self.seed

    def collect(self, terms: PolicyTerms) -> dict[str, Tensor]:
        assert terms.random is not None
        sampled = {"advantages": terms.advantages, "logprobs": terms.logprobs, "random": terms.random}
        return {**sampled, "clipped": self.clipped(terms).bites.to(torch.float64)}

    def __call__(self, terms: PolicyTerms) -> Tensor:
        assert terms.random is not None
        local, step = _covariance(terms)
        eligible = (step > self.low) & (step < self.high) & (terms.samples["clipped"] == 0)
        k = torch.minimum(_count(step, self.fraction), eligible.sum())
        bound = -_kth_largest(torch.where(eligible, -terms.samples["random"], -torch.inf), k.clamp(min=1))
        chosen = (local > self.low) & (local < self.high) & ~self.clipped(terms).bites & (terms.random <= bound)
        clipped = terms.ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return torch.where(chosen, 0, clipped_surrogate(terms.ratio, clipped, terms.advantages))

    def clipped(self, terms: PolicyTerms) -> Clipped:
        """Return PPO's clip, without the tokens chosen by covariance."""
        low, high = terms.ratio < 1 - self.clip_low, terms.ratio > 1 + self.clip_high
        return Clipped(low, high, driven_out(low, high, terms.advantages))


@dataclass(frozen=True)
class KLCov(Surrogate, name="kl_cov"):
    """x = −A·ρ + coefficient·|l − l_old| on the step's tokens with the largest covariance.

    These are max(⌊fraction·N⌋, 1) valid tokens, and those of equal covariance. A covariance of 0 is never penalised.

    fraction: fraction of the step's valid tokens. coefficient: weight of the penalty. Paper: arXiv 2505.22617.
    """

    needs_statistics = True
    token_level = True
    fraction: float = 2e-4
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "fraction", "coefficient")
        if self.fraction > 1:
            raise ValueError(f"fraction = {self.fraction} must be at most 1")

    def collect(self, terms: PolicyTerms) -> dict[str, Tensor]:
        return {"advantages": terms.advantages, "logprobs": terms.logprobs}

    def __call__(self, terms: PolicyTerms) -> Tensor:
        local, step = _covariance(terms)
        bound = _kth_largest(step.nan_to_num(nan=-torch.inf), _count(step, self.fraction))
        penalty = torch.where((local >= bound) & (local != 0), self.coefficient * terms.token_log_ratio.abs(), 0)
        return -terms.advantages * terms.ratio + penalty


@dataclass(frozen=True)
class REC(Surrogate, name="rec"):
    """x = −A'·l·I + regulariser; A' and I are constants, ρ is each token's.

    clip_mode: I is 1 (none); 1 − ε_low ≤ ρ ≤ 1 + ε_high (two-side); ρ ≤ 1 + ε_high if A ≥ 0, ρ ≥ 1 − ε_low if A ≤ 0
        (one-side; gspo-one-side uses the sequence's geometric mean ratio); two-side, or ρ ≤ 1 − ε_low' if A ≥ 0, or ρ ≥ 1 +
        ε_high' if A ≤ 0 (ring).
    weight: A' is A; A·ρ (importance_sampling); A times the geometric mean ratio (gspo_importance_sampling);
        A·e^{A/temperature} (advantage).
    regularizer: + coef·(l − l_old)² (k2), or − coef·l (forward-kl). regularizer_coef: coef of the regulariser.
    epsilon_low: ε_low. epsilon_high: ε_high. epsilon_low_prime: ε_low' of "ring". epsilon_high_prime: ε_high' of "ring".
    temperature: divides A in the weight "advantage".

    Paper: arXiv 2509.24203.
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
