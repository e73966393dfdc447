"""KL to a reference policy by the log-probs of the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from parallel_rl.counts import Aggregation, WeightedBy, check_aggregation, unit_of
from parallel_rl.functional.kl import KLType, kl_with_overflow
from parallel_rl.functional.ratio import exp_or_zero
from parallel_rl.losses.core.aggregation import aggregate, with_units
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import count_true, overflow_tokens
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.policy_config import KLConfig
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics


@dataclass(frozen=True)
class ReferenceKLLossConfig:
    """Options of `ReferenceKLLossFn`.

    estimator: k1, k2, k3, abs, or low_var_kl (k3 with verl's clamps).
    gradient: "plain" autograd, "score-function" by a weight exp(l − sg l), or "straight-through", that of k2; see the table
        in `parallel_rl.functional.kl`.
    input_clamp: bound on |l_ref − l|; None is off. output_clamp: bound on |estimate| (verl's `loss_max_clamp`); None is off.
    log_prob_min_clamp: lower bound < 0 on both log-probs, without gradient where the policy's is lower. None is off.
    aggregation: how tokens are averaged, see `parallel_rl.counts.token_weights`. max_length: divisor of "constant-length".
    token_weights: factors data["token_weights"] [B, S] ≥ 0; divide by the "count" of positive ones or their "sum".
    """

    estimator: KLType = "k3"
    gradient: Literal["plain", "score-function", "straight-through"] = "score-function"
    input_clamp: float | None = None
    output_clamp: float | None = None
    log_prob_min_clamp: float | None = None
    aggregation: Aggregation = "token-mean"
    max_length: int | None = None
    token_weights: WeightedBy | None = None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length, self.token_weights)
        if self.log_prob_min_clamp is not None and not self.log_prob_min_clamp < 0:
            raise ValueError(
                f"log_prob_min_clamp = {self.log_prob_min_clamp} must be below 0, as log-probs are, or None for no bound"
            )
        KLConfig(1.0, self.estimator, self.gradient, input_clamp=self.input_clamp, output_clamp=self.output_clamp)


@register_loss("reference_kl")
class ReferenceKLLossFn(LossFn[ReferenceKLLossConfig]):
    """Estimated KL to a reference policy on the policy's own samples; the local loss.

        L = AGG(k(log π(y), log π_ref(y)))

    The term `kl` of the policy loss as a separate loss: a component with others, against a second reference or a teacher
    (on-policy distillation with the estimator's gradient). `data` holds reference_policy_logprobs [B, S].

    Metrics: loss, num_valid_samples, overflow_tokens (by their estimate). Call and errors: see `LossFn`.
    Papers: http://joschu.net/blog/kl-approx.html, arXiv 2506.09477.

    >>> import torch
    >>> from parallel_rl import count_valid, get_loss
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> data["reference_policy_logprobs"] = torch.full((1, 3), -1.5)
    >>> loss, _ = get_loss("reference_kl")({"estimator": "k2"})(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    0.0065
    """

    config_class = ReferenceKLLossConfig

    @cached_property
    def requirements(self) -> Requirements:
        needs = Requirements((Field("reference_policy_logprobs"),), token_separable=True)
        return with_units(needs, self.config.aggregation, self.config.token_weights)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        cfg, logprobs, reference = self.config, batch.logprobs, batch["reference_policy_logprobs"]
        if cfg.log_prob_min_clamp is not None:
            logprobs, reference = (x.clamp(min=cfg.log_prob_min_clamp) for x in (logprobs, reference))
        # of the clamped log-prob, so the weight has no gradient below the clamp
        weight = exp_or_zero(logprobs - logprobs.detach()) if cfg.gradient == "score-function" else None
        estimate, overflow = kl_with_overflow(
            logprobs, reference, cfg.estimator, input_clamp=cfg.input_clamp, output_clamp=cfg.output_clamp, weight=weight,
            gradient_of_k2=cfg.gradient == "straight-through",
        )  # fmt: skip
        loss = aggregate(batch, estimate, cfg.aggregation, cfg.max_length)
        metrics = overflow_tokens(batch, [overflow])
        metrics["num_valid_samples"] = count_true(batch, batch.sequence_mask)
        per = unit_of(cfg.aggregation, cfg.token_weights)
        return loss, Metrics({"loss": Metric("share", loss, per=per), **metrics})
