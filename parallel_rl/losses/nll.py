"""Negative log-likelihood: supervised fine-tuning, and its forms per token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from parallel_rl.counts import Aggregation, WeightedBy, check_aggregation, unit_of
from parallel_rl.losses.core.aggregation import UNIT_FIELDS, aggregate, with_units
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import count_true
from parallel_rl.losses.core.requirements import Requirements
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics

NLLWeighting = Literal["none", "probability", "phi"]


def weighted_nll(logprobs: Tensor, weighting: NLLWeighting = "none", cutoff_prob: float = 1.0) -> Tensor:
    """Compute the negative log-likelihood times a constant weight of p = e^l; same shape.

        none         −l                             SFT
        probability  −sg[p]·l                       SFT-IS: the gradient of −p, maximum expected accuracy (arXiv 2508.05629)
        phi          −sg[p·(1 − p)]·min(l, log c)   SFT-phi: neither certain tokens nor those out of reach (2508.11408)

    >>> logprobs = torch.tensor([0.5, 0.9]).log()
    >>> weighted_nll(logprobs, "phi")
    tensor([0.1733, 0.0095])

    `cutoff_prob` is c of phi: more likely tokens have a value and no gradient. 1 is off.
    """
    if weighting == "none":
        return -logprobs
    p = logprobs.detach().exp()
    if weighting == "probability":
        return -p * logprobs
    capped = logprobs if cutoff_prob == 1 else torch.clamp(logprobs, max=math.log(cutoff_prob))
    return -p * -logprobs.detach().expm1() * capped


@dataclass(frozen=True)
class NLLLossConfig:
    """Options of `NLLLoss`.

    weighting: weight of a token of probability p: "none" 1 (SFT), "probability" p (SFT-IS), "phi" p(1 − p) (SFT-phi).
    cutoff_prob: with "phi", tokens above this probability have no gradient; 1 is off.
    aggregation: how tokens are averaged, see `parallel_rl.counts.token_weights`. With turn-mean, prompt-mean and
        trajectory-mean each turn (segment_ids [B, S]), prompt (group_ids [B]) or trajectory (run_ids [B]) of the step weighs
        the same; they need `statistics=` of `count`, and ids ≥ 0. max_length: divisor of "constant-length".
    token_weights: factors data["token_weights"] [B, S] ≥ 0; divide by the "count" of positive ones or their "sum".
    """

    weighting: NLLWeighting = "none"
    cutoff_prob: float = 1.0
    aggregation: Aggregation = "token-mean"
    max_length: int | None = None
    token_weights: WeightedBy | None = None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length, self.token_weights)
        if not 0 < self.cutoff_prob <= 1:
            raise ValueError(f"cutoff_prob = {self.cutoff_prob} must lie in (0, 1]; 1 is off")
        if self.cutoff_prob != 1 and self.weighting != "phi":
            raise ValueError(
                f"cutoff_prob = {self.cutoff_prob} has no effect with weighting = {self.weighting!r}; it goes with 'phi'"
            )


@register_loss("nll")
class NLLLoss(LossFn[NLLLossConfig]):
    """Negative log-likelihood of the valid tokens, optionally weighted by probability; the local loss.

        L = −AGG(w(π(y))·log π(y)),    w constant; by default L = −Σ token_mask·log π(y) / N_tok

    Metrics: loss, num_unmasked_tokens, num_valid_samples. Call and errors: see `LossFn`.
    Papers: arXiv 2508.05629 (SFT-IS), CHORD arXiv 2508.11408 (SFT-phi).

    >>> import torch
    >>> from parallel_rl import NLLLoss, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> loss, _ = NLLLoss()(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    1.3863
    """

    config_class = NLLLossConfig

    @cached_property
    def requirements(self) -> Requirements:
        cfg = self.config
        needs = with_units(Requirements(token_separable=True), cfg.aggregation, cfg.token_weights)
        # only the denominator needs the counts: no metric is divided by them
        return replace(needs, counted=needs.counted and cfg.aggregation in ("token-mean", *UNIT_FIELDS))

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        cfg = self.config
        losses = weighted_nll(batch.logprobs, cfg.weighting, cfg.cutoff_prob)
        loss = aggregate(batch, losses, cfg.aggregation, cfg.max_length)
        metrics = {
            "loss": Metric("share", loss, per=unit_of(cfg.aggregation, cfg.token_weights)),
            "num_unmasked_tokens": Metric("count", batch.mask.sum(dtype=torch.float64)),
            "num_valid_samples": count_true(batch, batch.sequence_mask),
        }
        return loss, Metrics(metrics)
