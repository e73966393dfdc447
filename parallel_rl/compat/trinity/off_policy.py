"""Trinity-RFT's losses for data off the policy: CISPO, TOPR, SAPO, sPPO, REC, importance sampling."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from parallel_rl.compat.trinity.policy import RatioLossFn, aggregation
from parallel_rl.functional.dppo import REC
from parallel_rl.functional.surrogate import PolicyTerms
from parallel_rl.functional.surrogates import CISPO, SPPO, TOPR, DetachedSAPO, Ratio
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.policy import PolicyLossFn as LibraryLoss
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.metrics import Metric


class CISPOPolicyLossFn(RatioLossFn):
    """CISPO, −A·sg[clip(ρ)]·l; enable_mask_clip drops tokens that PPO would clip at the mask ranges.

    Metrics: cispo_loss, ppo_kl, unmasked_frac. Paper: arXiv 2506.13585.
    """

    def __init__(
        self,
        backend: str = "verl",
        clip_range_low: float = 1.0,
        clip_range_high: float = 0.28,
        enable_mask_clip: bool = False,
        mask_clip_range_low: float = 1.0,
        mask_clip_range_high: float = 0.28,
        loss_agg_mode: str = "token-mean",
    ) -> None:
        super().__init__(backend)
        self.clip_range_low, self.clip_range_high = clip_range_low, clip_range_high
        self.enable_mask_clip, self.loss_agg_mode = enable_mask_clip, loss_agg_mode
        self.mask_clip_range_low, self.mask_clip_range_high = mask_clip_range_low, mask_clip_range_high
        mask = (mask_clip_range_low, mask_clip_range_high) if enable_mask_clip else (None, None)
        surrogate = CISPO(clip_range_low, clip_range_high, *mask)
        self.loss_fn = LibraryLoss(PolicyLossConfig(surrogate, aggregation(loss_agg_mode)))

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        dropped = torch.zeros_like(batch.mask)
        if self.enable_mask_clip:
            dropped = (terms.ratio > 1 + self.mask_clip_range_high) & (terms.advantages > 0)
            dropped = dropped | (terms.ratio < 1 - self.mask_clip_range_low) & (terms.advantages < 0)
        return {
            "cispo_loss": loss,
            "ppo_kl": batch.token_mean(-terms.token_log_ratio),
            "unmasked_frac": batch.token_mean(~dropped),
        }


class TOPRPolicyLossFn(RatioLossFn):
    """Tapered off-policy REINFORCE, −sg[α]·A·l, α = clip(ρ, 0, 1) if A ≤ advantage_threshold, else 1.

    ρ is per token (paper: per response, Q38). Metrics: topr_loss, avg_alpha, avg_ratio. Paper: arXiv 2503.14286.
    """

    def __init__(
        self, backend: str = "verl", advantage_threshold: float = 0.0, loss_agg_mode: str = "token-mean"
    ) -> None:
        super().__init__(backend)
        self.advantage_threshold, self.loss_agg_mode = advantage_threshold, loss_agg_mode
        self.loss_fn = LibraryLoss(PolicyLossConfig(TOPR(advantage_threshold), aggregation(loss_agg_mode)))

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        alpha = torch.where(terms.advantages <= self.advantage_threshold, terms.ratio.clamp(0, 1), 1)
        return {
            "topr_loss": loss,
            "avg_alpha": batch.token_mean(alpha),
            "avg_ratio": batch.token_mean(terms.ratio),
        }


class SAPOPolicyLossFn(RatioLossFn):
    """Soft gate as a constant weight, −A·sg[f(ρ)]·l.

    Unlike the paper's, its gradient grows with ρ (Q42: the library's `sapo`). Metrics: sapo_loss, ppo_kl, avg_soft_gate,
    avg_ratio, pos_adv_frac. Paper: arXiv 2511.20347.
    """

    def __init__(
        self, backend: str = "verl", tau_pos: float = 1.0, tau_neg: float = 1.05, loss_agg_mode: str = "token-mean"
    ) -> None:
        super().__init__(backend)
        self.tau_pos, self.tau_neg, self.loss_agg_mode = tau_pos, tau_neg, loss_agg_mode
        self.surrogate = DetachedSAPO(tau_pos, tau_neg)
        self.loss_fn = LibraryLoss(PolicyLossConfig(self.surrogate, aggregation(loss_agg_mode)))

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        return {
            "sapo_loss": loss,
            "ppo_kl": batch.token_mean(-terms.token_log_ratio),
            "avg_soft_gate": batch.token_mean(self.surrogate.gate(terms)),
            "avg_ratio": batch.token_mean(terms.ratio),
            "pos_adv_frac": batch.token_mean(terms.advantages > 0),
        }


class sPPOPolicyLossFn(RatioLossFn):
    """Simple policy optimization, −A·(l − l_old) inside 1/(1 + ε) ≤ ρ ≤ 1 + ε, for either sign of A.

    Metrics: pg_clipfrac, pg_loss. Paper: arXiv 2108.05828.
    """

    def __init__(self, backend: str = "verl", epsilon: float = 0.3, loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend)
        self.epsilon, self.loss_agg_mode = epsilon, loss_agg_mode
        self.loss_fn = LibraryLoss(PolicyLossConfig(SPPO(epsilon), aggregation(loss_agg_mode)))

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        outside = (terms.ratio < 1 / (1 + self.epsilon)) | (terms.ratio > 1 + self.epsilon)
        return {"pg_clipfrac": batch.token_mean(outside), "pg_loss": loss}


class ImportanceSamplingLossFn(RatioLossFn):
    """−A·ρ, log-ratio clamped to ±20 (gradient 0 beyond). Metrics: pg_loss, ratio/mean, approx_kl."""

    def __init__(self, backend: str = "verl", loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend)
        self.loss_agg_mode = loss_agg_mode
        self.loss_fn = LibraryLoss(PolicyLossConfig(Ratio(), aggregation(loss_agg_mode), log_ratio_clamp=20.0))

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        return {
            "pg_loss": loss,
            "ratio/mean": batch.token_mean(terms.ratio),
            "approx_kl": batch.token_mean(-terms.token_log_ratio),
        }


class RECPolicyLossFn(RatioLossFn):
    """REINFORCE with PPO's pieces by choice: −A'·l·I and a regulariser; ρ constant.

    There is no `loss_agg_mode`: the loss is a mean over tokens, with clip_mode "gspo-one-side" over sequences of their means.
    `weight` gspo_importance_sampling works with every clip_mode (in the origin with gspo-one-side only, Q39). The primes
    default to 0.4, in `default_args` to 0.6 and 2 (Q39). Metrics: pg_clipfrac, pg_loss. Paper: arXiv 2509.24203.
    """

    other_defaults: ClassVar = {"epsilon_low_prime": 0.6, "epsilon_high_prime": 2}

    def __init__(
        self,
        backend: str = "verl",
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        epsilon_low_prime: float = 0.4,
        epsilon_high_prime: float = 0.4,
        clip_mode: Literal["none", "one-side", "gspo-one-side", "two-side", "ring"] = "none",
        weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none",
        regularizer: Literal["none", "k2", "forward-kl"] = "none",
        regularizer_coef: float = 0.0,
        temp: float = 1.0,
    ) -> None:
        super().__init__(backend)
        self.epsilon_low, self.epsilon_high = epsilon_low, epsilon_high
        self.epsilon_low_prime, self.epsilon_high_prime = epsilon_low_prime, epsilon_high_prime
        self.clip_mode, self.weight, self.temp = clip_mode, weight, temp
        self.regularizer, self.regularizer_coef = regularizer, regularizer_coef
        for name in ("epsilon_low", "epsilon_low_prime"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)} must lie in (0, 1]")
        self.loss_agg_mode = "seq-mean-token-mean" if clip_mode == "gspo-one-side" else "token-mean"
        if regularizer == "none" or regularizer_coef == 0:
            regularizer, regularizer_coef = "none", 0.0
        bounds = (epsilon_low, epsilon_high, epsilon_low_prime, epsilon_high_prime)
        self.surrogate = REC(*bounds, clip_mode, weight, regularizer, regularizer_coef, temp)
        self.loss_fn = LibraryLoss(PolicyLossConfig(self.surrogate, aggregation(self.loss_agg_mode)))

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        return {"pg_clipfrac": batch.token_mean(~self.surrogate.keep(terms)), "pg_loss": loss}
