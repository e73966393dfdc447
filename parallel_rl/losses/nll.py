"""Negative log-likelihood: supervised fine-tuning."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_rl.losses.base import LossFn, NoConfig
from parallel_rl.losses.batch import TokenBatch
from parallel_rl.reduce import Metric, Metrics, token_weights


class NLLLoss(LossFn[NoConfig]):
    """Mean negative log-likelihood of all valid tokens; this rank's share.

        L = −Σ token_mask·log π(y) / N_tok

    Metrics: loss, num_unmasked_tokens, num_valid_samples. Call and errors: see `LossFn`.
    """

    config_class = NoConfig

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        loss = batch.weighted_sum(-batch.logprobs, token_weights("token-mean", batch.tokens_per_sequence, batch.counts))
        metrics = {
            "loss": Metric("share", loss),
            "num_unmasked_tokens": Metric("count", batch.mask.sum(dtype=torch.float64)),
            "num_valid_samples": batch.count(batch.sequence_mask),
        }
        return loss, Metrics(metrics)
