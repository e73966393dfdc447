"""A user's policy loss with a local denominator, as a run's config names it."""

from __future__ import annotations

from torch import Tensor

from parallel_rl import LossFn, Metrics, TokenBatch, register_loss
from parallel_rl.losses import Field, NoConfig, Requirements
from parallel_rl.metrics import Metric


@register_loss("doc_local_mean")
class LocalMean(LossFn[NoConfig]):
    """−mean(A·log π) over the tokens of the micro-batch."""

    config_class = NoConfig
    requirements = Requirements((Field("advantages"),))

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        terms = batch.local.masked(-batch["advantages"] * batch.logprobs, None)
        loss = terms.sum() / batch.local.valid.sum().clamp(min=1)
        return loss, Metrics({"loss": Metric("share", loss)})
