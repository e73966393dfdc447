"""The clipped policy-gradient loss: PPO, GRPO, DAPO, REINFORCE, RLOO, GSPO, CISPO, dual clip, by options."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.losses.base import LossFn
from parallel_rl.losses.batch import TokenBatch
from parallel_rl.losses.clipped_pg_config import ClippedPGLossConfig
from parallel_rl.objectives.importance import out_of_bounds, truncated
from parallel_rl.objectives.kl import jensen_shannon_estimate, kl_estimate
from parallel_rl.objectives.ratio import cispo, clipped_surrogate, exp_or_zero, safe_exp, straight_through_one
from parallel_rl.reduce import Aggregation, Metric, Metrics, token_weights
from parallel_rl.statistics import Statistics


class _Ratio(NamedTuple):
    plain: Tensor  # [T_local]
    clipped: Tensor


class ClippedPGLossFn(LossFn[ClippedPGLossConfig]):
    """Clipped policy gradient with KL to a reference and off-policy correction; this rank's share.

        L = AGG(ω·x) + β·AGG(kl) + μ·NLL(reward > 0),    x = max(−A·ρ, −A·clip(ρ, 1 − ε_min, 1 + ε_max))

    ρ = π/π_prev per token or its geometric mean over the sequence, ω = π_prev/π_generation (constant), AGG the mean
    over all valid tokens or over sequences. `data` holds, beside the common fields, advantages, generation_logprobs,
    prev_logprobs (unless force_on_policy_ratio) and, where the KL is on, reference_policy_logprobs, all [B, S] float,
    token-aligned; `rewards` [B] where positive_example_nll_weight > 0.

    Metrics: loss, kl_penalty (without β), probs_ratio and probs_ratio_clamped (means, _min, _max), clip_fraction_low
    and _high, token_mult_prob_error, gen_kl_error, policy_kl_error, js_divergence_error, sampling_importance_ratio,
    is_oob_ratio (with a truncation), approx_entropy, entropy, num_valid_samples, positive_nll_loss.

    Raises:
        ValueError: see `LossFn`; a config whose keys contradict each other or have no effect.

    Papers: arXiv 1707.06347 (PPO), 2402.03300 (GRPO), 2503.14476 (DAPO), 1912.09729 (dual clip), 2402.14740 (RLOO),
    2507.18071 (GSPO), 2506.13585 (CISPO), 2506.09477 (KL gradient), 2504.05118 (VAPO).
    """

    config_class = ClippedPGLossConfig
    needs_entropy = True

    @property
    def token_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        cfg = self.config
        prev = () if cfg.force_on_policy_ratio else ("prev_logprobs",)
        return ("advantages", *prev, "generation_logprobs", *(("reference_policy_logprobs",) if cfg.kl_in_loss else ()))

    @property
    def sequence_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("rewards",) if self.needs_statistics else ()

    @property
    def needs_statistics(self) -> bool:  # type: ignore[override]
        return self.config.positive_example_nll_weight > 0

    def collect_from(self, batch: TokenBatch) -> Statistics:
        return Statistics(
            {"positive_tokens": batch.count(batch.valid & (batch.per_sequence("rewards") > 0)[:, None]).value}
        )

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        cfg = self.config
        logprobs, advantages = batch.logprobs, batch["advantages"]
        prev = logprobs.detach() if cfg.force_on_policy_ratio else batch["prev_logprobs"]
        mode: Aggregation = "token-mean" if cfg.token_level_loss else "seq-mean-token-mean"
        weights = token_weights(mode, batch.tokens_per_sequence, batch.counts)

        ratio = self._ratio(batch, prev)
        if cfg.use_cispo:
            surrogate = cispo(logprobs, ratio.clipped, advantages)
        else:
            surrogate = clipped_surrogate(ratio.plain, ratio.clipped, advantages, cfg.ratio_clip_c)
        omega, correction_metrics = self._correction(batch, prev)
        loss = batch.weighted_sum(omega * surrogate if cfg.use_importance_sampling_correction else surrogate, weights)

        kl = nll = torch.zeros_like(loss)
        if cfg.kl_in_loss:
            kl = batch.weighted_sum(self._kl(batch), weights)
            loss = loss + cfg.reference_policy_kl_penalty * kl
        if self.needs_statistics:
            nll = self._positive_nll(batch)
            loss = loss + cfg.positive_example_nll_weight * nll
        shares = {
            "loss": Metric("share", loss),
            "kl_penalty": Metric("share", kl),
            "positive_nll_loss": Metric("share", nll),
        }
        return loss, Metrics(shares | correction_metrics | self._diagnostics(batch, prev, ratio))

    def _ratio(self, batch: TokenBatch, prev: Tensor) -> _Ratio:
        cfg, logprobs = self.config, batch.logprobs
        if cfg.force_on_policy_ratio:
            ratio = straight_through_one(logprobs)
            return _Ratio(ratio, ratio)
        if cfg.disable_ppo_ratio:
            return _Ratio(logprobs, logprobs)
        log_ratio = logprobs - prev
        if cfg.sequence_level_importance_ratios:
            log_ratio = batch.expand(batch.segment_mean(log_ratio))
        ratio = safe_exp(log_ratio)
        return _Ratio(ratio, ratio.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max))

    @torch.no_grad()
    def _correction(self, batch: TokenBatch, prev: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """ω [T_local] after truncation, and its metrics."""
        cfg, log_weight = self.config, prev - batch["generation_logprobs"]
        kind, (low, high) = cfg.truncated_importance_sampling_type, cfg.truncation_bounds
        by_sequence = cfg.sequence_level_importance_ratios
        weight = exp_or_zero(batch.segment_sum(log_weight) if by_sequence else log_weight)
        metrics = {}
        if kind == "seq-mask-tis":
            finite = torch.where(log_weight.isfinite(), log_weight, 0)
            dropped = out_of_bounds(batch.segment_mean(finite).exp(), low, high)
            metrics["is_oob_ratio"] = batch.sequence_mean(dropped)
            weight = torch.where(batch.expand(dropped), 0, weight)
        elif kind is not None:
            outside = out_of_bounds(weight, low, high)
            metrics["is_oob_ratio"] = batch.token_mean(batch.expand(outside) if by_sequence else outside)
            weight = truncated(weight, kind, low, high)
        metrics["sampling_importance_ratio"] = batch.sequence_mean(weight) if by_sequence else batch.token_mean(weight)
        return batch.expand(weight) if by_sequence else weight, metrics

    def _kl(self, batch: TokenBatch) -> Tensor:
        cfg, logprobs = self.config, batch.logprobs
        sampler = batch["generation_logprobs"] if cfg.use_on_policy_kl_approximation else logprobs.detach()
        return kl_estimate(
            logprobs,
            batch["reference_policy_logprobs"],
            cfg.reference_policy_kl_type,
            input_clamp=cfg.kl_input_clamp_value,
            output_clamp=cfg.kl_output_clamp_value,
            weight=exp_or_zero(logprobs - sampler),
        )

    def _positive_nll(self, batch: TokenBatch) -> Tensor:
        assert batch.statistics is not None
        count = batch.statistics["positive_tokens"].clamp(min=1)
        return batch.weighted_sum(-batch.logprobs, (batch.per_sequence("rewards") > 0) / count)

    @torch.no_grad()
    def _diagnostics(self, batch: TokenBatch, prev: Tensor, ratio: _Ratio) -> dict[str, Metric]:
        generation, logprobs, kind = batch["generation_logprobs"], batch.logprobs, self.config.reference_policy_kl_type
        per_token = {
            "probs_ratio": ratio.plain,
            "probs_ratio_clamped": ratio.clipped,
            "clip_fraction_low": ratio.plain < ratio.clipped,
            "clip_fraction_high": ratio.plain > ratio.clipped,
            "token_mult_prob_error": (generation - prev).abs().exp(),
            "gen_kl_error": kl_estimate(generation, prev, kind),
            "policy_kl_error": kl_estimate(prev, generation, kind),
            "js_divergence_error": jensen_shannon_estimate(prev, generation),
            "approx_entropy": -(logprobs - generation).exp() * logprobs,
            "entropy": batch.entropy,
        }
        metrics = {name: batch.token_mean(value) for name, value in per_token.items()}
        for name, value in (("probs_ratio", ratio.plain), ("probs_ratio_clamped", ratio.clipped)):
            metrics |= {f"{name}_min": batch.token_min(value), f"{name}_max": batch.token_max(value)}
        return metrics | {"num_valid_samples": batch.count(batch.sequence_mask)}
