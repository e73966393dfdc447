"""NeMo-RL's clipped policy gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from parallel_rl.compat.dense import Count
from parallel_rl.compat.nemo_rl.base import LogProbLoss, Result, batch_of, floats, shifted
from parallel_rl.compat.nemo_rl.interfaces import (
    ClippedPGLossConfig,
    LossType,
    MetricNormalizer,
    normalizers,
    policy_config,
)
from parallel_rl.functional.kl import kl_estimate
from parallel_rl.functional.ratio import safe_exp
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.call import share_of
from parallel_rl.losses.core.measures import token_means, token_ranges
from parallel_rl.losses.off_policy import importance_weight
from parallel_rl.losses.policy import PolicyLossFn
from parallel_rl.losses.policy_config import ImportanceConfig
from parallel_rl.losses.policy_metrics import PolicyShares
from parallel_rl.metrics import Metric
from parallel_rl.vocab.stats import TokenStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallel_rl.compat.nemo_rl.base import Data
    from parallel_rl.functional.kl import KLType


class ClippedPGLossFn(LogProbLoss):
    """Clipped policy gradient with reference KL and off-policy correction; see the library's class.

    It has the origin's numbers with these oddities. Q2: with sequence_level_importance_ratios the metric
    sampling_importance_ratio is B times too large. Q3: js_divergence_error has the estimator of the other direction. Q4:
    positive_example_nll_weight's NLL is divided by the tokens of this call (of each sequence, in the packing wrapper) and is
    0 without `rewards`. Q5: without a ratio ratio_clip_c never binds. Q6: a sequence's importance weight is a product, its
    ratio a geometric mean. Q7: the KL reads `curr_logprobs_unfiltered` [B, S − 1] of the data, if given; a log-prob that the
    sampler's truncation made −inf comes in as 0.
    Where releases differ it follows the present one. The KL's gradient has the score function (before 0.7 that of the estimate
    alone, and the clamp before the weight). force_on_policy_ratio replaces π_prev by π in weights and metrics too (since 0.6).

    Args:
        cfg: see `ClippedPGLossConfig`. use_fused_linear_logprobs: `prepare_loss_input` gets log-probs instead of logits.

    Raises:
        ConfigError: options that contradict each other.
    """

    def __init__(
        self, cfg: ClippedPGLossConfig | Mapping[str, object], use_fused_linear_logprobs: bool = False
    ) -> None:
        self.cfg = cfg = ClippedPGLossConfig.read(cfg)
        vars(self).update(cfg)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.policy_loss = PolicyLossFn(policy_config(cfg))
        self.loss_type = LossType.TOKEN_LEVEL if cfg["token_level_loss"] else LossType.SEQUENCE_LEVEL
        self.reference_policy_kl_penalty = 0.0 if cfg["use_kl_in_reward"] else cfg.number("reference_policy_kl_penalty")
        self.metric_normalizations = self._normalizations()

    def from_logprobs(
        self, logprobs: Tensor, data: Data, seqs: Count | None, toks: Count | None, by_row: bool = False
    ) -> Result:
        cfg, policy = self.cfg, self.policy_loss.policy
        names = {"advantages": True, "generation_logprobs": True, "prev_logprobs": not policy.on_policy}
        names["reference_policy_logprobs"] = policy.reads_reference
        fields = shifted(data, {name: "token" for name, read in names.items() if read})
        batch = batch_of(logprobs, data, fields, (seqs, toks))
        if policy.reads_reference and "curr_logprobs_unfiltered" in data:
            plain = batch_of(data["curr_logprobs_unfiltered"], data).logprobs
            batch = replace(batch, output=batch.output._replace(untruncated=TokenStats(plain, None, plain)))
        shares = self.policy_loss.shares(batch)
        loss, nll = share_of(shares.loss, None), torch.zeros_like(shares.loss)
        if cfg.number("positive_example_nll_weight") > 0 and "rewards" in data:
            nll = _positive_nll(batch, data["rewards"] > 0, by_row)
            loss = loss + cfg.number("positive_example_nll_weight") * nll
        metrics: dict[str, Tensor | Metric] = {
            "loss": loss,
            **self._metrics(batch, shares, by_row),
            "positive_nll_loss": nll,
        }
        metrics["num_valid_samples"] = batch.sequence_mask.sum()
        return loss, floats(metrics)

    @torch.no_grad()
    def _metrics(self, batch: TokenBatch, shares: PolicyShares, by_row: bool) -> dict[str, Metric]:
        policy, terms, generation = self.policy_loss.policy, shares.terms, batch["generation_logprobs"]
        prev = batch.logprobs if policy.on_policy else batch["prev_logprobs"]
        kind = cast("KLType", self.cfg["reference_policy_kl_type"])
        ratio = terms.ratio if policy.surrogate.uses_ratio else batch.logprobs
        clipped = ratio
        if policy.surrogate.uses_ratio and not policy.on_policy:
            low, high = self.cfg.number("ratio_clip_min"), self.cfg.number("ratio_clip_max")
            clipped = ratio.clamp(1 - low, 1 + high)
        mixture = torch.logaddexp(prev, generation) - torch.log(prev.new_tensor(2.0))
        metrics = token_means(
            batch,
            {
                "probs_ratio": ratio,
                "probs_ratio_clamped": clipped,
                "token_mult_prob_error": (generation - prev).abs().exp(),
                "gen_kl_error": kl_estimate(generation, prev, kind),
                "policy_kl_error": kl_estimate(prev, generation, kind),
                # Q3: e^{p − m} − 1 − (p − m), where the library has e^{m − p} − 1 − (m − p)
                "js_divergence_error": (kl_estimate(mixture, prev) + kl_estimate(mixture, generation)) / 2,
                "approx_entropy": -safe_exp(batch.logprobs - generation) * batch.logprobs,
            },
        )
        metrics |= token_ranges(batch, {"probs_ratio": ratio, "probs_ratio_clamped": clipped})
        metrics["kl_penalty"] = shares.metrics.get("kl_penalty", Metric("share", torch.zeros_like(shares.loss)))
        recorded = prev if policy.on_policy else batch.recorded("prev_logprobs")
        return metrics | self._importance(batch, recorded, by_row)

    def _importance(self, batch: TokenBatch, prev: Tensor, by_row: bool) -> dict[str, Metric]:
        sequence = bool(self.cfg["sequence_level_importance_ratios"])
        plain = ImportanceConfig("sequence-sum" if sequence else "token")
        weight, metrics = importance_weight(batch, prev, self.policy_loss.policy.importance or plain)
        if self.cfg["truncated_importance_sampling_type"] is None:
            metrics.pop("is_oob_ratio", None)
        if sequence and not by_row and weight.numel():  # Q2: all weights, also of masked rows, for each valid row
            rows = weight.view(batch.shape)[:, 0].sum(dtype=torch.float64)
            metrics["sampling_importance_ratio"] = Metric("share", rows * batch.sequence_mask.sum() / batch.counts.seqs)
        return metrics

    def _normalizations(self) -> dict[str, MetricNormalizer]:
        """Map metrics to their divisors, for a trainer that calls with counts of 1 and divides after the step."""
        tokens, sequences, none = normalizers()
        gradient = tokens if self.cfg["token_level_loss"] else sequences
        by_sequence = bool(self.cfg["sequence_level_importance_ratios"])
        divisors = {"loss": gradient, "kl_penalty": gradient}
        divisors |= dict.fromkeys(
            ("probs_ratio", "probs_ratio_clamped", "token_mult_prob_error", "approx_entropy"), tokens
        )
        divisors |= dict.fromkeys(("gen_kl_error", "policy_kl_error", "js_divergence_error"), tokens)
        divisors |= {"sampling_importance_ratio": sequences if by_sequence else tokens}
        divisors |= dict.fromkeys(("num_valid_samples", "positive_nll_loss"), none)
        divisors |= {f"{name}_{end}": none for name in ("probs_ratio", "probs_ratio_clamped") for end in ("min", "max")}
        if (kind := self.cfg["truncated_importance_sampling_type"]) is not None:
            divisors["is_oob_ratio"] = sequences if kind == "seq-mask-tis" else tokens
        return divisors


def _positive_nll(batch: TokenBatch, positive: Tensor, by_row: bool) -> Tensor:
    """Compute the NLL of positive rows' valid tokens over their number, or the sum of row means (Q4)."""
    lengths = batch.tokens_per_sequence * positive
    count = lengths if by_row else lengths.sum()
    return batch.weighted_sum(-batch.logprobs, positive / count.clamp(min=1).double())
