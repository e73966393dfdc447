"""Losses on (even, odd) pairs of rows: a preference and the chosen response's likelihood."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.counts import Aggregation, token_weights
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.loss import Account, ConfigT
from parallel_rl.losses.core.measures import count_true, overflow_tokens, sequence_mean
from parallel_rl.metrics import Metric, Metrics


class PairTerms(NamedTuple):
    """Local losses of preference and chosen NLL, their weights (0: off), rewards, overflowing tokens."""

    preference: Tensor
    sft: Tensor
    weights: tuple[float, float]
    chosen: Tensor
    rejected: Tensor
    overflow: Tensor | None = None


class PreferenceWithNLL(LossFn[ConfigT]):
    """Base of losses with a preference of pairs and an NLL of the chosen responses."""

    @abstractmethod
    def terms(self, batch: TokenBatch) -> PairTerms:
        """Compute both terms without their weights, and the rewards [B/2] of chosen and rejected rows."""

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        terms = self.terms(batch)
        first, second = terms.weights
        loss = first * terms.preference + second * terms.sft if second else first * terms.preference
        shares = {"loss": loss, "preference_loss": terms.preference, "sft_loss": terms.sft}
        metrics = {name: Metric("share", value, per="pairs") for name, value in shares.items()}
        metrics |= overflow_tokens(batch, [terms.overflow])
        return loss, Metrics(metrics | pair_metrics(batch, terms.chosen, terms.rejected))

    def account(self, batch: TokenBatch) -> Account:
        terms = self.terms(batch)
        shares = zip(("preference_loss", "sft_loss"), terms.weights, terms[:2], strict=True)
        return Account({name: weight * share for name, weight, share in shares if weight})


def response_sum(batch: TokenBatch, x: Tensor, average: bool = False) -> Tensor:
    """Sum [T_local] over the responses' valid tokens to [B] in float64, or average."""
    return (batch.segment_mean if average else batch.segment_sum)(x.to(torch.float64))


def pair_mask(batch: TokenBatch) -> Tensor:
    """Return [B/2] bool: pairs whose rows are both valid."""
    return batch.sequence_mask[::2] & batch.sequence_mask[1::2]


def pair_mean(batch: TokenBatch, per_pair: Tensor) -> Tensor:
    """Return this rank's part of Σ_pairs x / (N_seq / 2), in the dtype of the mathematics."""
    share = batch.sequence_sum(per_pair, pair_mask(batch), batch.counts.seqs / 2)
    return share.to(batch.output.dtype)


def pair_metrics(batch: TokenBatch, chosen: Tensor, rejected: Tensor) -> dict[str, Metric]:
    """Measure accuracy (ties are wrong), mean rewards and the number of pairs, from rewards [B/2]."""
    mask, count = pair_mask(batch), batch.counts.seqs / 2
    samples = count_true(batch, batch.sequence_mask)
    return {
        "accuracy": sequence_mean(batch, chosen > rejected, mask, count, "pairs"),
        "rewards_chosen_mean": sequence_mean(batch, chosen, mask, count, "pairs"),
        "rewards_rejected_mean": sequence_mean(batch, rejected, mask, count, "pairs"),
        "num_valid_samples": samples._replace(value=samples.value / 2),
    }


def chosen_nll(batch: TokenBatch, average: bool) -> Tensor:
    """Average the chosen response's NLL, a sum over tokens or a mean, over pairs: the local loss."""
    mode: Aggregation = "seq-mean-token-mean" if average else "seq-mean-token-sum"
    weights = token_weights(mode, batch.tokens_per_sequence, batch.counts)
    chosen = torch.arange(weights.numel(), device=weights.device) % 2 == 0
    pair = pair_mask(batch).repeat_interleave(2, output_size=weights.numel())
    return batch.weighted_sum(-batch.logprobs, torch.where(chosen & pair, 2 * weights, 0))
