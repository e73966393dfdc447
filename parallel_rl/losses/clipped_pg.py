"""Clipped policy gradient with NeMo-RL's option, data and metric names."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_rl.functional.kl import jensen_shannon_estimate
from parallel_rl.functional.ratio import safe_exp
from parallel_rl.functional.surrogate import PolicyTerms
from parallel_rl.losses.clipped_pg_config import ClippedPGLossConfig
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import count_true, token_means, token_ranges
from parallel_rl.losses.off_policy import importance_weight
from parallel_rl.losses.off_policy_config import ImportanceConfig
from parallel_rl.losses.policy import PolicyLoss
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.losses.policy_metrics import divergences
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics


@register_loss("clipped_pg")
class ClippedPGLossFn(PolicyLoss[ClippedPGLossConfig]):
    """Clipped policy gradient with KL to a reference and off-policy correction; the local loss.

        L = AGG(ω·x) + β·AGG(kl) + μ·NLL(reward > 0),    x = max(−A·ρ, −A·clip(ρ, 1 − ε_min, 1 + ε_max))

    ρ = π/π_prev per token or its geometric mean over the sequence, ω = π_prev/π_generation (constant), AGG the mean over all
    valid tokens or over sequences. `data` holds the common fields and, [B, S] float and token-aligned, advantages,
    prev_logprobs (unless force_on_policy_ratio), generation_logprobs (required with ω or if the KL's gradient reads it;
    otherwise for metrics) and, with a KL, reference_policy_logprobs; `rewards` [B] with positive_example_nll_weight > 0.

    Metrics: loss, kl_penalty (without β), probs_ratio and probs_ratio_clamped (means, _min, _max), clip_fraction_low
    and _high, entropy, num_valid_samples, positive_nll_loss, overflow_tokens, is_oob_ratio (with a truncation); with
    generation_logprobs token_mult_prob_error, gen_kl_error, policy_kl_error, js_divergence_error,
    sampling_importance_ratio, approx_entropy.

    Raises:
        ValueError: see `LossFn`; a config whose keys contradict each other or have no effect.

    Papers: arXiv 1707.06347 (PPO), 2402.03300 (GRPO), 2503.14476 (DAPO), 1912.09729 (dual clip), 2402.14740 (RLOO),
    2507.18071 (GSPO), 2506.13585 (CISPO), 2506.09477 (KL gradient), 2504.05118 (VAPO).

    >>> import torch
    >>> from parallel_rl import ClippedPGLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> names = ("prev_logprobs", "reference_policy_logprobs")
    >>> data |= {"advantages": torch.ones(1, 3)} | {name: torch.full((1, 3), -1.5) for name in names}
    >>> loss_fn = ClippedPGLossFn({"ratio_clip_max": 0.28})
    >>> loss, _ = loss_fn(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    -1.1204
    """

    config_class = ClippedPGLossConfig

    @property
    def policy(self) -> PolicyLossConfig:
        return self.config.policy

    @property
    def kl_in_reward(self) -> bool:
        return self.config.use_kl_in_reward

    def _token_fields(self) -> dict[str, bool]:
        """Read what the metrics compare with the step's first policy, even if the loss does not."""
        return {**super()._token_fields(), "prev_logprobs": not self.config.force_on_policy_ratio}

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        shares = self.shares(batch)
        zero = Metric("share", torch.zeros_like(shares.loss), per=shares.metrics["policy_loss"].per)
        none = Metric("count", torch.zeros_like(shares.loss, dtype=torch.float64, requires_grad=False))
        metrics = {"kl_penalty": zero, "positive_nll_loss": zero, "overflow_tokens": none, **shares.metrics}
        del metrics["policy_loss"]
        return shares.loss, Metrics({**metrics, **self._diagnostics(batch, shares.terms)})

    @torch.no_grad()
    def _diagnostics(self, batch: TokenBatch, terms: PolicyTerms) -> dict[str, Metric]:
        cfg, logprobs = self.config, batch.logprobs
        prev = logprobs if cfg.force_on_policy_ratio else batch["prev_logprobs"]
        ratio = logprobs if cfg.disable_ppo_ratio else terms.ratio
        of_clip = self.policy.surrogate.clipped(terms)
        clipped = ratio if of_clip is None else ratio.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
        none = torch.zeros_like(ratio)
        per_token = {
            "probs_ratio": ratio,
            "probs_ratio_clamped": clipped,
            "clip_fraction_low": none if of_clip is None else of_clip.low,
            "clip_fraction_high": none if of_clip is None else of_clip.high,
        } | ({"entropy": batch.entropy} if batch.has_entropy else {})
        sampled = batch.has("generation_logprobs")
        if sampled:
            per_token |= self._against_sampler(prev, batch["generation_logprobs"], logprobs)
        metrics = token_means(batch, per_token)
        metrics |= token_ranges(batch, {"probs_ratio": ratio, "probs_ratio_clamped": clipped})
        if sampled and self.policy.importance is None:  # reported although not applied
            plain = ImportanceConfig("sequence-sum" if cfg.sequence_level_importance_ratios else "token")
            given = prev if cfg.force_on_policy_ratio else batch.recorded("prev_logprobs")
            metrics |= importance_weight(batch, given, plain)[1]
        return metrics | {"num_valid_samples": count_true(batch, batch.sequence_mask)}

    def _against_sampler(self, prev: Tensor, generation: Tensor, logprobs: Tensor) -> dict[str, Tensor]:
        return {
            **divergences(prev, generation, self.config.reference_policy_kl_type),
            "js_divergence_error": jensen_shannon_estimate(prev, generation),
            "approx_entropy": -safe_exp(logprobs - generation) * logprobs,
        }
