"""The clipped policy-gradient loss: PPO, GRPO, DAPO, REINFORCE, RLOO, GSPO, CISPO, dual clip, by options."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.losses.base import LossFn
from parallel_rl.losses.batch import TokenBatch
from parallel_rl.objectives.importance import Truncation, out_of_bounds, truncated
from parallel_rl.objectives.kl import KLType, jensen_shannon_estimate, kl_estimate
from parallel_rl.objectives.ratio import cispo, clipped_surrogate, exp_or_zero, safe_exp, straight_through_one
from parallel_rl.reduce import Aggregation, Metric, Metrics, token_weights
from parallel_rl.statistics import Statistics


@dataclass(frozen=True)
class ClippedPGLossConfig:
    """Options of `ClippedPGLossFn`.

    disable_ppo_ratio: REINFORCE / RLOO: log π in place of the ratio.
    token_level_loss: mean over all valid tokens; False is the mean over sequences of their token means.
    sequence_level_importance_ratios: GSPO: the geometric mean of a sequence's ratios, and product importance weights.
    ratio_clip_min, ratio_clip_max: the ratio is clipped to [1 − min, 1 + max].
    ratio_clip_c: dual clip, > 1; None is off.
    reference_policy_kl_penalty: β of the KL to the reference; 0 is off.
    reference_policy_kl_type: k1, k2 or k3.
    kl_input_clamp_value, kl_output_clamp_value: bounds on the log-ratio and on the estimate; None is off.
    use_kl_in_reward: the KL is part of the advantages already, so the loss leaves it out.
    use_on_policy_kl_approximation: weigh the KL by π/π_generation instead of by 1 (with gradient).
    use_importance_sampling_correction: multiply the actor loss by π_prev/π_generation.
    truncated_importance_sampling_type: tis (clamp), icepop (drop tokens) or seq-mask-tis (drop sequences by geometric
        mean).
    truncated_importance_sampling_ratio, truncated_importance_sampling_ratio_min: upper and lower bound of that.
    force_on_policy_ratio: the ratio is exp(l − sg[l]), for strictly on-policy steps; prev_logprobs is not read.
    use_cispo: CISPO.
    positive_example_nll_weight: μ of VAPO's NLL on sequences with reward > 0; the loss then needs `statistics`.
    """

    disable_ppo_ratio: bool = False
    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: KLType = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    use_on_policy_kl_approximation: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: Truncation | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    force_on_policy_ratio: bool = False
    use_cispo: bool = False
    positive_example_nll_weight: float = 0.0

    @property
    def kl_in_loss(self) -> bool:
        return self.reference_policy_kl_penalty != 0 and not self.use_kl_in_reward

    @property
    def truncation_bounds(self) -> tuple[float, float]:
        return self.truncated_importance_sampling_ratio_min or 0.0, self.truncated_importance_sampling_ratio or math.inf

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_contradictions()
        self._check_truncation()

    def _check_ranges(self) -> None:
        for name in ("ratio_clip_min", "ratio_clip_max", "reference_policy_kl_penalty", "positive_example_nll_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 0")
        for name in ("kl_input_clamp_value", "kl_output_clamp_value"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive, or None for no clamp")
        if self.ratio_clip_c is not None and not self.ratio_clip_c > 1:
            raise ValueError(f"ratio_clip_c = {self.ratio_clip_c} must exceed 1, or be None for no dual clip")

    def _check_contradictions(self) -> None:
        """Pairs that contradict each other, and options that the others leave without effect."""
        no_ratio = (
            "disable_ppo_ratio"
            if self.disable_ppo_ratio
            else "force_on_policy_ratio"
            if self.force_on_policy_ratio
            else None
        )
        rules = [
            (
                "disable_ppo_ratio",
                self.disable_ppo_ratio and self.force_on_policy_ratio,
                "force_on_policy_ratio = True",
            ),
            (
                "token_level_loss",
                self.token_level_loss and self.sequence_level_importance_ratios,
                "sequence_level_importance_ratios = True",
            ),
            ("token_level_loss", not self.token_level_loss and self.use_cispo, "use_cispo = True"),
            (
                "sequence_level_importance_ratios",
                self.sequence_level_importance_ratios and self.use_cispo,
                "use_cispo = True",
            ),
            ("ratio_clip_c", self.ratio_clip_c is not None and self.use_cispo, "use_cispo = True"),
            (
                "use_on_policy_kl_approximation",
                self.use_on_policy_kl_approximation and not self.kl_in_loss,
                "no KL in the loss",
            ),
        ]
        if no_ratio:
            rules.append(("use_cispo", self.use_cispo, f"{no_ratio} = True"))
            rules += [
                (name, self._is_set(name), f"{no_ratio} = True")
                for name in ("ratio_clip_c", "ratio_clip_min", "ratio_clip_max")
            ]
        for name, wrong, because in rules:
            if wrong:
                raise ValueError(f"{name} = {getattr(self, name)!r} does not go with {because}; leave out one of them")

    def _is_set(self, name: str) -> bool:
        default = next(field.default for field in dataclasses.fields(self) if field.name == name)
        return bool(getattr(self, name) != default)

    def _check_truncation(self) -> None:
        kind, high = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        low = self.truncated_importance_sampling_ratio_min
        if kind is None:
            for name in ("truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} = {getattr(self, name)} has no effect without truncated_importance_sampling_type"
                    )
            return
        if not self.use_importance_sampling_correction:
            raise ValueError(
                f"truncated_importance_sampling_type = {kind!r} has no effect without use_importance_sampling_correction = True"
            )
        if high is None or not high > 0:
            raise ValueError(f"truncated_importance_sampling_ratio = {high} must be positive with type {kind!r}")
        if low is None and kind != "tis":
            raise ValueError(f"truncated_importance_sampling_ratio_min must be set with type {kind!r}")
        if low is not None and not 0 <= low <= high:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min = {low} must lie in [0, truncated_importance_sampling_ratio = {high}]"
            )
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            raise ValueError(
                "truncated_importance_sampling_type = 'seq-mask-tis' does not go with sequence_level_importance_ratios = True"
            )


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
        if cfg.use_on_policy_kl_approximation:
            weight = exp_or_zero(logprobs - batch["generation_logprobs"])
        else:
            weight = straight_through_one(logprobs)
        return kl_estimate(
            logprobs,
            batch["reference_policy_logprobs"],
            cfg.reference_policy_kl_type,
            input_clamp=cfg.kl_input_clamp_value,
            output_clamp=cfg.kl_output_clamp_value,
            weight=weight,
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
