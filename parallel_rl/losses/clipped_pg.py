"""Clipped policy gradient with NeMo-RL's options, data and metric names."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.importance import Truncation
from parallel_rl.functional.kl import jensen_shannon_estimate
from parallel_rl.functional.ratio import safe_exp
from parallel_rl.functional.surrogate import PolicyTerms, Surrogate
from parallel_rl.functional.surrogates import CISPO, PPO, Ratio, Reinforce
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import count_true, token_means, token_ranges
from parallel_rl.losses.off_policy import importance_weight
from parallel_rl.losses.off_policy_config import ImportanceConfig
from parallel_rl.losses.policy import PolicyLoss
from parallel_rl.losses.policy_config import KLConfig, PolicyLossConfig, check_clamps
from parallel_rl.losses.policy_metrics import divergences
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics


@dataclass(frozen=True)
class ClippedPGLossConfig:
    """Options of `ClippedPGLossFn`.

    disable_ppo_ratio: REINFORCE / RLOO: log π in place of the ratio.
    token_level_loss: mean over all valid tokens; False is the mean over sequences of their token means.
    sequence_level_importance_ratios: GSPO: the geometric mean of a sequence's ratios, and product importance weights.
    ratio_clip_min, ratio_clip_max: the ratio is clipped to [1 − min, 1 + max].
    ratio_clip_c: dual clip, > 1; None is off.
    reference_policy_kl_penalty: β of the KL to the reference; 0 is off. reference_policy_kl_type: k1, k2 or k3.
    kl_input_clamp_value: bound on |log-ratio|; None is off. kl_output_clamp_value: bound on |estimate|; None is off.
    use_kl_in_reward: the KL is part of the advantages already, so the loss leaves it out.
    use_on_policy_kl_approximation: weigh the KL by π/π_generation, with gradient.
    use_importance_sampling_correction: multiply the actor loss by π_prev/π_generation.
    truncated_importance_sampling_type: tis (clamp), icepop (drop tokens) or seq-mask-tis (drop sequences by their
        geometric mean).
    truncated_importance_sampling_ratio: upper bound of the weight.
    truncated_importance_sampling_ratio_min: lower bound of the weight.
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
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
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

    @cached_property
    def policy(self) -> PolicyLossConfig:
        """Translate the options to those of `PolicyLossFn`."""
        sequence = self.sequence_level_importance_ratios
        surrogate: Surrogate = PPO(self.ratio_clip_min, self.ratio_clip_max, self.ratio_clip_c)
        if self.use_cispo:
            surrogate = CISPO(self.ratio_clip_min, self.ratio_clip_max)
        elif self.disable_ppo_ratio:
            surrogate = Reinforce()
        elif self.force_on_policy_ratio:
            surrogate = Ratio()
        importance = kl = None
        if self.use_importance_sampling_correction:
            kind, (low, high) = self.truncated_importance_sampling_type, self.truncation_bounds
            importance = ImportanceConfig("sequence-sum" if sequence else "token", kind or "none", low, high)
        if self.kl_in_loss:
            kl = KLConfig(
                self.reference_policy_kl_penalty,
                self.reference_policy_kl_type,
                "generation" if self.use_on_policy_kl_approximation else "score-function",
                input_clamp=self.kl_input_clamp_value,
                output_clamp=self.kl_output_clamp_value,
            )
        of_sequence = sequence and surrogate.uses_ratio and not self.force_on_policy_ratio
        return PolicyLossConfig(
            surrogate,
            "token-mean" if self.token_level_loss else "seq-mean-token-mean",
            ratio_level="sequence-mean" if of_sequence else "token",
            on_policy=self.force_on_policy_ratio,
            importance=importance,
            kl=kl,
            positive_nll_weight=self.positive_example_nll_weight,
        )

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
        positive(self, "ratio_clip_min", "ratio_clip_max", zero=True)
        positive(self, "reference_policy_kl_penalty", "positive_example_nll_weight", zero=True)
        check_clamps(self, "kl_input_clamp_value", "kl_output_clamp_value")
        if self.ratio_clip_c is not None and not self.ratio_clip_c > 1:
            raise ValueError(f"ratio_clip_c = {self.ratio_clip_c} must exceed 1, or be None for no dual clip")

    def _check_contradictions(self) -> None:
        sequence, without_ratio = self.sequence_level_importance_ratios, ("disable_ppo_ratio", "force_on_policy_ratio")
        no_kl = self.use_on_policy_kl_approximation and not self.kl_in_loss
        no_ratio = next((name for name in without_ratio if getattr(self, name)), None)
        rules = [
            ("disable_ppo_ratio", all(getattr(self, name) for name in without_ratio), "force_on_policy_ratio = True"),
            ("token_level_loss", self.token_level_loss and sequence, "sequence_level_importance_ratios = True"),
            ("token_level_loss", not self.token_level_loss and self.use_cispo, "use_cispo = True"),
            ("sequence_level_importance_ratios", sequence and self.use_cispo, "use_cispo = True"),
            ("ratio_clip_c", self.ratio_clip_c is not None and self.use_cispo, "use_cispo = True"),
            ("use_on_policy_kl_approximation", no_kl, "no KL in the loss"),
        ]
        if no_ratio:
            rules.append(("use_cispo", self.use_cispo, f"{no_ratio} = True"))
            rules += [
                (name, self._is_set(name), f"{no_ratio} = True")
                for name in ("ratio_clip_c", "ratio_clip_min", "ratio_clip_max")
            ]
        for name, wrong, because in rules:
            if wrong:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} is incompatible with {because}; leave out one of them"
                )

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
                "truncated_importance_sampling_type = 'seq-mask-tis' is incompatible with "
                "sequence_level_importance_ratios = True"
            )


@register_loss("clipped_pg")
class ClippedPGLossFn(PolicyLoss[ClippedPGLossConfig]):
    """Clipped policy gradient with KL to a reference and off-policy correction; the local loss.

        L = AGG(ω·x) + β·AGG(kl) + μ·NLL(reward > 0),    x = max(−A·ρ, −A·clip(ρ, 1 − ε_min, 1 + ε_max))

    ρ = π/π_prev per token or its geometric mean over the sequence, ω = π_prev/π_generation (constant), AGG the mean over all
    valid tokens or over sequences. `data` holds the common fields and, [B, S] float and token-aligned, advantages,
    prev_logprobs (unless force_on_policy_ratio), generation_logprobs (required with ω or if the KL's gradient reads it;
    otherwise for metrics) and, with a KL, reference_policy_logprobs; `rewards` [B] with positive_example_nll_weight > 0.

    Metrics: loss, kl_penalty (without β), probs_ratio and probs_ratio_clamped (means, _min, _max), clip_fraction_low and _high,
    entropy, num_valid_samples, positive_nll_loss, overflow_tokens, is_oob_ratio (with a truncation); with generation_logprobs
    token_mult_prob_error, gen_kl_error, policy_kl_error, js_divergence_error, sampling_importance_ratio, approx_entropy.
    Call and errors: see `LossFn`; a config whose keys contradict each other or have no effect raises.
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
            recorded = prev if cfg.force_on_policy_ratio else batch.recorded("prev_logprobs")
            metrics |= importance_weight(batch, recorded, plain)[1]
        return metrics | {"num_valid_samples": count_true(batch, batch.sequence_mask)}

    def _against_sampler(self, prev: Tensor, generation: Tensor, logprobs: Tensor) -> dict[str, Tensor]:
        return {
            **divergences(prev, generation, self.config.reference_policy_kl_type),
            "js_divergence_error": jensen_shannon_estimate(prev, generation),
            "approx_entropy": -safe_exp(logprobs - generation) * logprobs,
        }
