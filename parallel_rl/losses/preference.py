"""Losses on (even, odd) pairs of rows: their shared terms, DPO and its relatives with a reference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.counts import Aggregation, token_weights
from parallel_rl.functional import preference
from parallel_rl.functional.ratio import finite_log_ratio
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.loss import Account, ConfigT
from parallel_rl.losses.core.measures import count_true, overflow_tokens, sequence_mean
from parallel_rl.losses.core.requirements import Alignment, Field, Requirements
from parallel_rl.losses.registry import register_loss
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


PairKind = Literal[
    "sigmoid", "robust", "ipo", "hinge", "exo", "nca", "bco", "sppo-hard", "apo-zero", "apo-down", "discopop"
]

_PLAIN: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "ipo": preference.ipo,
    "hinge": preference.hinge,
    "nca": preference.nca,
    "bco": preference.bco,
    "sppo-hard": preference.sppo_hard,
    "apo-zero": preference.apo_zero,
    "apo-down": preference.apo_down,
    "discopop": preference.discopop,
}
_SMOOTHED: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": preference.dpo,
    "robust": preference.robust_dpo,
    "exo": preference.exo,
}


@dataclass(frozen=True)
class DPOLossConfig:
    """Options of `DPOLossFn`.

    kind: the function of a pair's log-ratios, see `parallel_rl.functional.preference`: "sigmoid" (DPO; with label_smoothing
        cDPO), "robust", "ipo", "hinge", "exo", "nca", "bco", "sppo-hard", "apo-zero", "apo-down" or "discopop".
    label_smoothing: ε, the fraction of labels taken to be wrong, in [0, 0.5), for sigmoid, robust and exo (which needs it).
    length_desensitization: α of LD-DPO, the weight of tokens beyond the shorter response's length, in policy and reference.
    reference_policy_kl_penalty: β. preference_loss_weight: w_p. sft_loss_weight: w_s.
    preference_average_log_probs: D is a mean over a response's tokens instead of a sum. The authors of IPO take means, those of
        the other kinds sums. sft_average_log_probs: NLL_chosen is a mean over tokens instead of a sum.
    reference_logprobs_alignment: "token" stores the reference log-prob of token t at t, "predictor" (NeMo-RL) at t − 1.
    """

    kind: PairKind = "sigmoid"
    label_smoothing: float = 0.0
    length_desensitization: float | None = None
    reference_policy_kl_penalty: float = 0.05
    preference_loss_weight: float = 1.0
    sft_loss_weight: float = 0.0
    preference_average_log_probs: bool = False
    sft_average_log_probs: bool = False
    reference_logprobs_alignment: Alignment = "token"

    def __post_init__(self) -> None:
        positive(self, "reference_policy_kl_penalty")
        positive(self, "preference_loss_weight", "sft_loss_weight", zero=True)
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            raise ValueError(
                "preference_loss_weight and sft_loss_weight are both 0, so the loss would be 0; set one of them"
            )
        if self.sft_average_log_probs and self.sft_loss_weight == 0:
            raise ValueError("sft_average_log_probs = True has no effect with sft_loss_weight = 0")
        check_smoothing(self.label_smoothing)
        if self.label_smoothing and self.kind not in _SMOOTHED:
            raise ValueError(
                f"label_smoothing = {self.label_smoothing} has no effect with kind = {self.kind!r}; "
                f"it goes with {', '.join(_SMOOTHED)}"
            )
        if self.preference_loss_weight == 0 and self.kind != "sigmoid":
            raise ValueError(f"kind = {self.kind!r} has no effect with preference_loss_weight = 0")
        if self.kind == "exo" and self.label_smoothing == 0:
            raise ValueError("label_smoothing = 0 makes kind = 'exo' infinite; its authors take 0.001")
        alpha = self.length_desensitization
        if alpha is not None and not 0 <= alpha < 1:
            raise ValueError(f"length_desensitization = {alpha} must lie in [0, 1); None is off, as 1 would be")


def check_smoothing(label_smoothing: float) -> None:
    """Raise ValueError unless 0 ≤ ε < 0.5."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing = {label_smoothing} must lie in [0, 0.5)")


@register_loss("dpo")
class DPOLossFn(PreferenceWithNLL[DPOLossConfig]):
    """Direct preference optimization with a supervised term on the chosen responses; the local loss.

        L = Σ_pairs [w_p·f(D_chosen, D_rejected) + w_s·NLL_chosen] / (N_seq / 2),    D = Σ_t log π − log π_ref

    with f = −log σ(β·(D_chosen − D_rejected)) unless `kind` says otherwise. Rows are pairs: chosen even, rejected odd; sums
    over a response run in float64. `data` holds reference_policy_logprobs [B, S] and the common fields.

    Metrics: loss, preference_loss, sft_loss, accuracy, rewards_chosen_mean, rewards_rejected_mean (without β),
    num_valid_samples (pairs), overflow_tokens (infinite log-ratio, left out of D). Call and errors: see `LossFn`; an
    odd number of rows raises. Papers: arXiv 2305.18290 (DPO), 2310.12036 (IPO), 2403.00409 (robust DPO), 2409.06411
    (LD-DPO), 2404.19733 (NLL term); other kinds: see their functions.

    >>> import torch
    >>> from parallel_rl import DPOLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2], [0, 3, 1]]), "token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2)}
    >>> data["reference_policy_logprobs"] = torch.tensor([[0.0, -2.0, -2.0], [0.0, -1.0, -1.0]])
    >>> loss_fn = DPOLossFn({"reference_policy_kl_penalty": 0.1})
    >>> loss, _ = loss_fn(torch.zeros(2, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    0.5981
    """

    config_class = DPOLossConfig

    @cached_property
    def requirements(self) -> Requirements:
        reference = Field("reference_policy_logprobs", alignment=self.config.reference_logprobs_alignment)
        return Requirements((reference,), paired=True, ordered=self.config.length_desensitization is not None)

    def terms(self, batch: TokenBatch) -> PairTerms:
        cfg = self.config
        log_ratio, overflow = finite_log_ratio(batch.logprobs, batch["reference_policy_logprobs"])
        if cfg.length_desensitization is not None:
            log_ratio = torch.where(self._beyond(batch), cfg.length_desensitization * log_ratio, log_ratio)
        ratios = response_sum(batch, log_ratio, cfg.preference_average_log_probs)
        chosen, rejected = ratios[::2], ratios[1::2]
        preferred = pair_mean(batch, self._per_pair(chosen, rejected))
        sft = chosen_nll(batch, cfg.sft_average_log_probs) if cfg.sft_loss_weight else torch.zeros_like(preferred)
        return PairTerms(preferred, sft, (cfg.preference_loss_weight, cfg.sft_loss_weight), chosen, rejected, overflow)

    def _per_pair(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        cfg = self.config
        if cfg.kind in _SMOOTHED:
            return _SMOOTHED[cfg.kind](chosen, rejected, cfg.reference_policy_kl_penalty, cfg.label_smoothing)
        return _PLAIN[cfg.kind](chosen, rejected, cfg.reference_policy_kl_penalty)

    @staticmethod
    def _beyond(batch: TokenBatch) -> Tensor:
        """Return [T_local] bool: tokens of a response after its first min(n_chosen, n_rejected) ones."""
        lengths = batch.tokens_per_sequence
        shorter = torch.minimum(lengths[::2], lengths[1::2]).repeat_interleave(2, output_size=lengths.numel())
        return batch.in_order(batch.valid.cumsum(1) > shorter[:, None])
