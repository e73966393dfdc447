"""Trinity-RFT's policy-gradient losses PPO, GSPO and OPMD, and the base of losses on the ratio to the old policy."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from parallel_rl.compat.dense import Step, dense_batch
from parallel_rl.compat.trinity.base import PolicyLossFn, Result, aggregation, reported, scaled, trinity_call
from parallel_rl.functional.surrogate import PolicyTerms
from parallel_rl.functional.surrogates import OPMD, PPO
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.call import share_of
from parallel_rl.losses.core.measures import sequence_mean
from parallel_rl.losses.off_policy_config import OffPolicyMaskConfig
from parallel_rl.losses.policy import PolicyLossFn as LibraryLoss
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.metrics import Metric


def clip_bounds(clip_range: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    """Return the lower and upper clip range, each `clip_range` if None; ValueError without either."""
    low, high = clip_range if low is None else low, clip_range if high is None else high
    if low is None or high is None:
        raise ValueError(f"clip_range_low = {low} and clip_range_high = {high}: give both, or clip_range for both")
    return low, high


class RatioLossFn(PolicyLossFn):
    """Policy loss with the usual call: log-probs, old log-probs, mask and advantages, all [B, T]."""

    loss_fn: LibraryLoss
    loss_agg_mode: str

    @trinity_call
    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor, *, within: Step
    ) -> Result:
        fields = {"prev_logprobs": old_logprob, "generation_logprobs": logprob.detach(), "advantages": advantages}
        loss, metrics = self.share(dense_batch(logprob, action_mask, fields, within))
        return loss, reported(metrics, within)

    def share(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the local loss of a batch with the fields of the call, and its metrics."""
        shares = self.loss_fn.shares(batch)
        loss = scaled(share_of(shares.loss, None), batch, self.loss_agg_mode)
        with torch.no_grad():
            return loss, self._metrics(batch, shares.terms, Metric("share", loss))

    @abstractmethod
    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        """Return the metrics by the origin's names."""


class PPOPolicyLossFn(RatioLossFn):
    """Clipped surrogate, always with a dual clip; the log-ratio is clamped to ±20 (gradient 0 beyond).

    clip_range: the default of clip_range_low and clip_range_high. clip_ratio_c: of the dual clip, > 1. enable_sequence_masking:
    drop tokens with A < 0 if the sequence's mean of l_old − l exceeds delta_sequence_masking. fallback_to_policy_gradient: the
    ratio is 1 with its gradient, old_logprob is not read.
    Metrics: pg_clipfrac, pg_clipfrac_lower, ppo_kl, pg_loss; with masking seq_mask/masked_tokens (also counts padding with A
    < 0) and seq_mask/mean_sequence_kl. Papers: arXiv 1707.06347, 1912.09729, 2512.02556.
    """

    other_defaults: ClassVar = {"clip_range": 0.2}

    def __init__(
        self,
        backend: str = "verl",
        clip_range: float | None = None,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        clip_ratio_c: float = 3.0,
        loss_agg_mode: str = "token-mean",
        enable_sequence_masking: bool = False,
        delta_sequence_masking: float = 0.1,
        fallback_to_policy_gradient: bool = False,
    ) -> None:
        super().__init__(backend)
        self.clip_range_low, self.clip_range_high = clip_bounds(clip_range, clip_range_low, clip_range_high)
        self.clip_ratio_c, self.loss_agg_mode = clip_ratio_c, loss_agg_mode
        self.enable_sequence_masking, self.delta_sequence_masking = enable_sequence_masking, delta_sequence_masking
        self.fallback_to_policy_gradient = fallback_to_policy_gradient
        # the fallback's drift is from its own log-probs: 0
        behaviour: Literal["prev", "generation"] = "generation" if fallback_to_policy_gradient else "prev"
        masking = OffPolicyMaskConfig(delta_sequence_masking, behaviour) if enable_sequence_masking else None
        self.loss_fn = LibraryLoss(
            PolicyLossConfig(
                PPO(self.clip_range_low, self.clip_range_high, clip_ratio_c),
                aggregation(loss_agg_mode),
                on_policy=fallback_to_policy_gradient,
                log_ratio_clamp=None if fallback_to_policy_gradient else 20.0,
                off_policy_mask=masking,
            )
        )

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        ratio, advantages = terms.ratio, terms.advantages
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_range_low, 1 + self.clip_range_high)
        above = (torch.maximum(plain, clipped) > -advantages * self.clip_ratio_c) & (advantages < 0)
        metrics = {
            "pg_clipfrac": batch.token_mean(clipped > plain),
            "pg_clipfrac_lower": batch.token_mean(above),
            "ppo_kl": batch.token_mean(-terms.token_log_ratio),
            "pg_loss": loss,
        }
        if self.enable_sequence_masking:
            drift = batch.segment_mean(-terms.token_log_ratio)
            masked = (batch.local.data["advantages"] < 0) & (drift > self.delta_sequence_masking)[:, None]
            masked_tokens = Metric("share", masked.sum(dtype=torch.float64) / batch.counts.toks)
            metrics |= {
                "seq_mask/masked_tokens": masked_tokens,
                "seq_mask/mean_sequence_kl": sequence_mean(batch, drift),
            }
        return metrics


class GSPOLossFn(RatioLossFn):
    """GSPO-token: the sequence's geometric mean ratio, gradient per token, clipped; no dual clip.

    Trinity's trainer overrides this loss_agg_mode (Q35); here it holds. Metrics: pg_clipfrac, ppo_kl, pg_loss, ppo_kl_seq (a
    mean over all rows, also empty ones). Paper: arXiv 2507.18071.
    """

    other_defaults: ClassVar = {"clip_range_low": 0.0003, "clip_range_high": 0.0004}

    def __init__(
        self,
        backend: str = "verl",
        clip_range: float | None = None,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        loss_agg_mode: str = "seq-mean-token-mean",
    ) -> None:
        super().__init__(backend)
        self.clip_range_low, self.clip_range_high = clip_bounds(clip_range, clip_range_low, clip_range_high)
        self.loss_agg_mode = loss_agg_mode
        surrogate = PPO(self.clip_range_low, self.clip_range_high)
        self.loss_fn = LibraryLoss(
            PolicyLossConfig(surrogate, aggregation(loss_agg_mode), ratio_level="sequence-mean", ratio_gradient="token")
        )

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        plain = -terms.advantages * terms.ratio
        clipped = -terms.advantages * terms.ratio.clamp(1 - self.clip_range_low, 1 + self.clip_range_high)
        return {
            "pg_clipfrac": batch.token_mean(clipped > plain),
            "ppo_kl": batch.token_mean(-terms.token_log_ratio),
            "pg_loss": loss,
            "ppo_kl_seq": sequence_mean(batch, batch.segment_mean(-terms.token_log_ratio)),
        }


class OPMDPolicyLossFn(PolicyLossFn):
    """Online policy mirror descent, −A·l / (1 + τ). Metrics: opmd_loss. Papers: 2505.17826, 2509.24203."""

    def __init__(self, backend: str = "verl", tau: float = 1.0, loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend)
        self.tau, self.loss_agg_mode = tau, loss_agg_mode
        self.loss_fn = LibraryLoss(PolicyLossConfig(OPMD(tau), aggregation(loss_agg_mode)))

    @trinity_call
    def __call__(self, logprob: Tensor, action_mask: Tensor, advantages: Tensor, *, within: Step) -> Result:
        batch = dense_batch(logprob, action_mask, {"advantages": advantages}, within)
        loss = scaled(self.loss_fn.shares(batch).loss, batch, self.loss_agg_mode)
        return loss, reported({"opmd_loss": Metric("share", loss)}, within)
