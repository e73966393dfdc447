"""Clip-Cov and KL-Cov: limits on the tokens whose log-prob and advantage covary most over the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.ratio import clipped_surrogate
from parallel_rl.functional.surrogate import Clipped, PolicyTerms, Surrogate, driven_out


def _covariance(terms: PolicyTerms) -> tuple[Tensor, Tensor]:
    """Compute (A − mean A)·(l − mean l) of local tokens and of the step (NaN if masked), by step means."""
    all_advantages, all_logprobs = terms.samples["advantages"], terms.samples["logprobs"]
    pairs = (terms.advantages, all_advantages), (terms.logprobs.detach(), all_logprobs)
    (here, step), (here_too, step_too) = (_centred(x.double(), samples) for x, samples in pairs)
    return here * here_too, step * step_too


def _centred(x: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the samples' mean from both; exactly 0 if all samples are equal, without rounding."""
    mean, unset = samples.nanmean(), samples.isnan()
    if not samples.numel():
        return x - mean, samples - mean
    equal = torch.where(unset, torch.inf, samples).amin() == torch.where(unset, -torch.inf, samples).amax()
    return torch.where(equal, 0, x - mean), torch.where(equal & ~unset, 0, samples - mean)


def _number(samples: Tensor, fraction: float) -> Tensor:
    return ((~samples.isnan()).sum().double() * fraction).floor().clamp(min=1).long()


def _kth_largest(values: Tensor, k: Tensor) -> Tensor:
    if not values.numel():
        return values.new_tensor(torch.inf)
    return values.sort(descending=True).values.gather(0, (k - 1).clamp(0, values.numel() - 1).view(1))[0]


@dataclass(frozen=True)
class ClipCov(Surrogate, name="clip_cov"):
    """PPO's surrogate with the loss of a few high-covariance tokens set to 0.

    Of the step's valid tokens that PPO does not clip, with covariance within (low, high), max(⌊fraction·N⌋, 1) are drawn by
    (seed, `sample_ids`, position), alike on any layout.

    clip_low, clip_high: PPO's ε on either side of 1. fraction: share of the step's valid tokens. low, high: range of
    the covariance, both excluded. seed: seed of the choice. Paper: arXiv 2505.22617.
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
        here, step = _covariance(terms)
        eligible = (step > self.low) & (step < self.high) & (terms.samples["clipped"] == 0)
        # the k eligible tokens with the smallest uniform numbers
        k = torch.minimum(_number(step, self.fraction), eligible.sum())
        bound = -_kth_largest(torch.where(eligible, -terms.samples["random"], -torch.inf), k.clamp(min=1))
        chosen = (here > self.low) & (here < self.high) & ~self.clipped(terms).bites & (terms.random <= bound)
        clipped = terms.ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return torch.where(chosen, 0, clipped_surrogate(terms.ratio, clipped, terms.advantages))

    def clipped(self, terms: PolicyTerms) -> Clipped:
        """Return PPO's clip, without the drawn tokens."""
        low, high = terms.ratio < 1 - self.clip_low, terms.ratio > 1 + self.clip_high
        return Clipped(low, high, driven_out(low, high, terms.advantages))


@dataclass(frozen=True)
class KLCov(Surrogate, name="kl_cov"):
    """x = −A·ρ + coefficient·|l − l_old| on the step's tokens with the largest covariance.

    These are max(⌊fraction·N⌋, 1) of the valid tokens. Equal covariances are penalised together, except 0: if all advantages
    are equal nothing covaries.

    fraction: share of the step's valid tokens. coefficient: weight of the penalty. Paper: arXiv 2505.22617.
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
        here, step = _covariance(terms)
        bound = _kth_largest(step.nan_to_num(nan=-torch.inf), _number(step, self.fraction))
        penalty = torch.where((here >= bound) & (here != 0), self.coefficient * terms.token_log_ratio.abs(), 0)
        return -terms.advantages * terms.ratio + penalty
