"""A user's objectives and a user's loss, registered for the law."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_rl import LossFn, Metrics, TokenBatch, register_loss, register_objective
from parallel_rl.losses import Field, NoConfig, Requirements
from parallel_rl.metrics import Mean, Measure, Metric, MinMax, Sum


@register_objective("test_entropy", token_fields=("advantages",), needs_entropy=True, token_separable=True)
def EntropyBonus(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Measure]]:
    """A user's objective: policy gradient with an entropy bonus, and metrics of its own."""
    measures = {"sure": Mean(batch.entropy < 1.5), "entropy": MinMax(batch.entropy), "likely": Sum(logprobs > -2)}
    return -batch["advantages"] * logprobs - 0.3 * batch.entropy, measures


@register_objective("test_sequence_token", token_fields=("prev_logprobs",))
def SequenceToken(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """A user's objective: a token term that uses a quantity of the whole sequence, with gradient through both."""
    return batch.expand(batch.segment_mean(logprobs - batch["prev_logprobs"]).exp()) * logprobs.exp()


@register_objective("test_sequence", level="sequence", sequence_fields=("rewards",))
def SequenceLevel(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Measure]]:
    """A user's objective on sums of log-probs, with metrics of its own."""
    measures = {"good": Sum(batch.per_sequence("rewards") > 0), "sum": MinMax(logprobs), "likelihood": Mean(logprobs)}
    return (logprobs / 10).exp() * (1 + batch.per_sequence("rewards").square()), measures


@register_objective("test_pair", level="pair", token_fields=("reference_policy_logprobs",))
def PairLevel(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Measure]]:
    """A user's objective on pairs, hinge on the difference of log-probs to the reference's, with metrics of its own."""
    margins = (logprobs - batch.segment_sum(batch["reference_policy_logprobs"])).view(-1, 2)
    better = margins[:, 0] - margins[:, 1]
    return torch.relu(1 - better), {"accuracy": Mean(better > 0), "margin": MinMax(better), "wins": Sum(better > 0)}


@register_loss("test_class")
class UserLoss(LossFn[NoConfig]):
    """A user's class."""

    config_class = NoConfig
    requirements = Requirements(
        (Field("advantages"), Field("rewards", per="sequence")), entropy=True, token_separable=True
    )

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        weights = batch.per_sequence("rewards") / batch.counts.toks
        loss = batch.weighted_sum(batch["advantages"] * batch.logprobs.exp() - batch.entropy, weights)
        return loss, Metrics({"loss": Metric("share", loss)})
