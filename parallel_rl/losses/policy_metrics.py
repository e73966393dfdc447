"""Results of the policy loss on a batch: the share, its parts, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.functional.importance import mismatch
from parallel_rl.functional.kl import KLType, kl_estimate
from parallel_rl.functional.ratio import MAX_EXPONENT, safe_exp
from parallel_rl.functional.surrogate import Clipped, PolicyTerms
from parallel_rl.losses.core.loss import Account
from parallel_rl.metrics import Metric

_WEIGHT, _SQUARE = "ω", "ω²"  # parts of the effective sample size
# ω beyond these bounds counts as off policy: verl's default threshold and its inverse
FAR = 2.0

#: meaning of each policy metric; ω = π_prev/π_generation of a token, a = log ω, means are over valid tokens
DESCRIPTIONS: Mapping[str, str] = {
    "loss": "the whole loss",
    "policy_loss": "the surrogate's part of the loss",
    "kl_penalty": "the KL penalty's part of the loss, without the coefficient",
    "positive_nll_loss": "the NLL's part of the loss, without the weight",
    "entropy": "mean entropy of the policy at a token, in nats",
    "entropy_coef": "coefficient of the entropy bonus in this step, if it changes",
    "approx_entropy": "mean of −(π/π_generation)·log π, an estimate of the entropy from the samples",
    "probs_ratio": "mean of ρ at the level of the loss; `_min` and `_max` over the step",
    "probs_ratio_clamped": "mean of ρ after the clip",
    "approx_kl": "mean of log π_prev − log π: how far this step's updates moved the policy (verl: ppo_kl)",
    "clip_fraction_low": "fraction of tokens below the clip's range, for either sign of A",
    "clip_fraction_high": "fraction of tokens above the clip's range, for either sign of A",
    "pg_clipfrac": "fraction of tokens whose gradient the clip removes (verl's name)",
    "pg_clipfrac_lower": "fraction of tokens clipped by a dual clip, or by DPPO's cap on the ratio",
    "rejected_fraction": "fraction of tokens that the rejection masks",
    "off_policy_masked": "fraction of tokens that the off-policy mask removes",
    "is_oob_ratio": "fraction of importance weights outside of their bounds",
    "sampling_importance_ratio": "mean importance weight after its truncation",
    "sampling_logp_difference": "mean of |a|, a clamped to ±20; `_max` over the step (TRL's name)",
    "gen_kl_error": "estimate of KL(π_generation ‖ π_prev), k3 (NeMo-RL's name; verl: k3_kl)",
    "policy_kl_error": "estimate of KL(π_prev ‖ π_generation), k3",
    "js_divergence_error": "estimate of the Jensen-Shannon divergence of π_prev and π_generation",
    "token_mult_prob_error": "mean of e^|a|: 1 where both agree (NeMo-RL's name)",
    "chi2_token": "mean of ω² − 1, the χ² divergence (verl's name)",
    "rollout_is_eff_sample_size": "(Σω)² / (N·Σω²), the effective fraction of tokens under weights ω (verl's name)",
    "rollout_is_ratio_fraction_high": "fraction of tokens with ω above 2 (verl's name)",
    "rollout_is_ratio_fraction_low": "fraction of tokens with ω below 1/2",
    "training_log_ppl": "mean of −log π_prev, the logarithm of the trainer's perplexity (verl's name, over sequences there)",
    "rollout_log_ppl": "mean of −log π_generation, the logarithm of the sampler's perplexity",
    "log_ppl_diff": "training_log_ppl − rollout_log_ppl: positive if the tokens are less likely to the trainer",
    "num_valid_samples": "number of valid sequences",
    "overflow_tokens": "number of valid tokens that the loss drops because a ratio or a KL estimate overflows (above e^80)",
    "dropped_tokens": "number of valid tokens that a truncated policy does not keep",
}


def clip_fractions(clipped: Clipped | None) -> dict[str, Tensor]:
    """Return [T_local] per fraction of tokens that a clip concerns; empty for a surrogate without one."""
    if clipped is None:
        return {}
    shares = {"clip_fraction_low": clipped.low, "clip_fraction_high": clipped.high, "pg_clipfrac": clipped.bites}
    return shares if clipped.dual is None else {**shares, "pg_clipfrac_lower": clipped.dual}


def divergences(prev: Tensor, generation: Tensor, kind: KLType = "k3") -> dict[str, Tensor]:
    """Measure trainer-sampler distances [T_local] by NeMo-RL's names; `kind` is of both KL estimates."""
    return {
        "token_mult_prob_error": safe_exp((generation - prev).abs()),
        "gen_kl_error": kl_estimate(generation, prev, kind, input_clamp=MAX_EXPONENT),
        "policy_kl_error": kl_estimate(prev, generation, kind, input_clamp=MAX_EXPONENT),
    }


def mismatch_values(prev: Tensor, generation: Tensor) -> dict[str, Tensor]:
    """Compute the [T_local] values that `mismatch_metrics` averages; few, as each operator is a launch."""
    generation = torch.where(generation == -torch.inf, prev, generation)  # the sampler did not keep the token
    log_weight = mismatch(prev, generation, "k1")
    weight = log_weight.exp()
    square = weight * weight
    return {
        **divergences(prev, generation),
        "sampling_logp_difference": log_weight.abs(),
        "chi2_token": square - 1,
        "rollout_is_ratio_fraction_high": weight > FAR,
        "rollout_is_ratio_fraction_low": weight < 1 / FAR,
        "training_log_ppl": -prev,
        "rollout_log_ppl": -generation,
        _WEIGHT: weight,
        _SQUARE: square,
    }


def mismatch_metrics(means: Mapping[str, Metric]) -> dict[str, Metric]:
    """Derive the trainer-sampler metrics from the means of `mismatch_values`, and keep the other means."""
    metrics = {name: metric for name, metric in means.items() if name not in (_WEIGHT, _SQUARE)}
    trainer, sampler = means["training_log_ppl"].value, means["rollout_log_ppl"].value
    metrics["log_ppl_diff"] = Metric("share", trainer - sampler, per=means["rollout_log_ppl"].per)
    metrics["rollout_is_eff_sample_size"] = Metric("square-ratio", means[_WEIGHT].value, means[_SQUARE].value)
    return metrics


class MaskedSurrogate(NamedTuple):
    """Surrogate after weights and masks, with both and their metrics.

    Attributes:
        passed: reason → [T_local] bool, the tokens that keep their surrogate.
        importance, overflow: [T_local] ω, if weighted; bool, the tokens whose ratio to the recorded policy overflows.
    """

    surrogate: Tensor
    metrics: dict[str, Metric]
    passed: dict[str, Tensor]
    importance: Tensor | None = None
    overflow: Tensor | None = None


@dataclass(frozen=True)
class PolicyShares:
    """Local loss, its metrics, the surrogate's inputs, and parts, masks and token values.

    Attributes:
        parts: local losses with their coefficients; their sum is the loss.
        passed: see `MaskedSurrogate`, including the rejection.
    """

    loss: Tensor
    metrics: dict[str, Metric]
    terms: PolicyTerms
    parts: dict[str, Tensor]
    passed: dict[str, Tensor]
    values: dict[str, Tensor]

    def account(self, mask: Tensor, clipped: Clipped | None, *, has_ratio: bool) -> Account:
        """Split the local loss; `clipped` is the surrogate's, `has_ratio` whether its ratio has a meaning."""
        held = {reason: mask & ~passed for reason, passed in self.passed.items()}
        if "importance" in self.values:
            held["importance_weight_0"] = mask & (self.values["importance"] == 0)
        if clipped is not None:
            flags = {"below_range": clipped.low, "above_range": clipped.high, "clipped": clipped.bites}
            flags |= {} if clipped.dual is None else {"dual_clipped": clipped.dual}
            held |= {name: mask & flag for name, flag in flags.items()}
        values = {**({"ratio": self.terms.ratio} if has_ratio else {}), **self.values}
        return Account(self.parts, held, {name: x.detach() for name, x in values.items()})
