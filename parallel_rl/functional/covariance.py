"""Clip-Cov and KL-Cov: limits on the tokens whose log-prob and advantage covary most over the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.ratio import clipped_surrogate
from parallel_rl.functional.surrogate import Clipped, PolicyTerms, Surrogate, driven_out


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

    clip_low, clip_high: PPO's ε on either side of 1. fraction: fraction of the step's valid tokens. low, high: range of the
    covariance, both excluded. seed: seed of the choice. Paper: arXiv 2505.22617.
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
