"""Losses of preference pairs without a reference policy: SimPO, CPO, ORPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.functional.preference import dpo, orpo_odds_ratio, simpo
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.requirements import Requirements
from parallel_rl.losses.preference import (
    PairTerms,
    PreferenceWithNLL,
    check_smoothing,
    chosen_nll,
    pair_mean,
    pair_metrics,
    response_sum,
)
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics


@dataclass(frozen=True)
class SimPOLossConfig:
    """beta: β. gamma: the margin γ. label_smoothing: ε in [0, 0.5), as in cDPO."""

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        positive(self, "beta")
        check_smoothing(self.label_smoothing)


@register_loss("simpo")
class SimPOLossFn(LossFn[SimPOLossConfig]):
    """Simple preference optimization; the local loss.

        L = Σ_pairs −log σ(β·(a_chosen − a_rejected) − γ) / (N_seq / 2),    a = the mean log π of a response's tokens

    Rows are pairs: chosen even, rejected odd; a response without a token has a = 0.

    Metrics: loss, accuracy, rewards_chosen_mean, rewards_rejected_mean (a, without β), num_valid_samples (pairs).
    Call and errors: see `LossFn`; an odd number of rows raises. Paper: arXiv 2405.14734.

    >>> import torch
    >>> from parallel_rl import SimPOLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2], [0, 3, 1]]), "token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2)}
    >>> loss, _ = SimPOLossFn()(torch.zeros(2, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    1.3133
    """

    config_class = SimPOLossConfig
    requirements = Requirements(paired=True)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        cfg, means = self.config, response_sum(batch, batch.logprobs, average=True)
        chosen, rejected = means[::2], means[1::2]
        loss = pair_mean(batch, simpo(chosen, rejected, cfg.beta, cfg.gamma, cfg.label_smoothing))
        return loss, Metrics({"loss": Metric("share", loss, per="pairs")} | pair_metrics(batch, chosen, rejected))


@dataclass(frozen=True)
class CPOLossConfig:
    """Options of `CPOLossFn`.

    beta: β. label_smoothing: ε in [0, 0.5), as in cDPO. sft_loss_weight: weight of NLL_chosen; 0 is off.
    sft_average_log_probs: average that NLL over a response's tokens (the authors' code) instead of summing (their formula).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_loss_weight: float = 1.0
    sft_average_log_probs: bool = False

    def __post_init__(self) -> None:
        positive(self, "beta")
        check_smoothing(self.label_smoothing)
        positive(self, "sft_loss_weight", zero=True)
        if self.sft_average_log_probs and self.sft_loss_weight == 0:
            raise ValueError("sft_average_log_probs = True has no effect with sft_loss_weight = 0")


@register_loss("cpo")
class CPOLossFn(PreferenceWithNLL[CPOLossConfig]):
    """Contrastive preference optimization; the local loss.

        L = Σ_pairs [−log σ(β·(S_chosen − S_rejected)) + w_s·NLL_chosen] / (N_seq / 2),    S = Σ_t log π

    Rows are pairs: chosen even, rejected odd; sums over a response run in float64.

    Metrics: loss, preference_loss, sft_loss, accuracy, rewards_chosen_mean, rewards_rejected_mean (S, without β),
    num_valid_samples (pairs). Call and errors: see `LossFn`; an odd number of rows raises. Paper: arXiv 2401.08417.

    >>> import torch
    >>> from parallel_rl import CPOLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2], [0, 3, 1]]), "token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2)}
    >>> loss, _ = CPOLossFn()(torch.zeros(2, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    3.4657
    """

    config_class = CPOLossConfig
    requirements = Requirements(paired=True)

    def terms(self, batch: TokenBatch) -> PairTerms:
        cfg, sums = self.config, response_sum(batch, batch.logprobs)
        chosen, rejected = sums[::2], sums[1::2]
        preferred = pair_mean(batch, dpo(chosen, rejected, cfg.beta, cfg.label_smoothing))
        sft = chosen_nll(batch, cfg.sft_average_log_probs)
        return PairTerms(preferred, sft, (1.0, cfg.sft_loss_weight), chosen, rejected)


@dataclass(frozen=True)
class ORPOLossConfig:
    """beta: λ, the weight of the odds-ratio term."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        positive(self, "beta")


@register_loss("orpo")
class ORPOLossFn(PreferenceWithNLL[ORPOLossConfig]):
    """Odds ratio preference optimization; the local loss.

        L = Σ_pairs [NLL_chosen − λ·log σ(log odds(a_chosen) − log odds(a_rejected))] / (N_seq / 2)

    a is the mean log π of a response's tokens, at most −ε of the mathematics' dtype; NLL = −a, log odds(a) = a − log(1 −
    e^a). Rows are pairs: chosen even, rejected odd; the means run in float64.

    Metrics: loss, preference_loss (with λ), sft_loss, accuracy, rewards_chosen_mean, rewards_rejected_mean (a),
    num_valid_samples (pairs). Call and errors: see `LossFn`; an odd number of rows raises. Paper: arXiv 2403.07691.

    >>> import torch
    >>> from parallel_rl import ORPOLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2], [0, 3, 1]]), "token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2)}
    >>> loss, _ = ORPOLossFn()(torch.zeros(2, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    1.4556
    """

    config_class = ORPOLossConfig
    requirements = Requirements(paired=True)

    def terms(self, batch: TokenBatch) -> PairTerms:
        means = response_sum(batch, batch.logprobs, average=True)
        chosen, rejected = means[::2], means[1::2]
        # 1 − e^a of a near 0 is only as exact as the log-probs, not as their float64 means
        eps = torch.finfo(batch.output.dtype).eps
        preferred = pair_mean(batch, orpo_odds_ratio(chosen, rejected, self.config.beta, eps))
        return PairTerms(preferred, chosen_nll(batch, average=True), (1.0, 1.0), chosen, rejected)
