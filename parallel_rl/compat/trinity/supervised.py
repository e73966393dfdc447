"""Trinity-RFT's losses without an advantage: SFT, SFT-IS, SFT-phi, and DPO."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_rl.compat.dense import Step, dense_batch
from parallel_rl.compat.trinity.base import PolicyLossFn, Result, aggregation, reported, scaled, trinity_call
from parallel_rl.functional.kl import straight_through
from parallel_rl.functional.preference import dpo
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import sequence_mean
from parallel_rl.losses.nll import NLLLoss, NLLLossConfig
from parallel_rl.losses.pairs import response_sum
from parallel_rl.metrics import Metric
from parallel_rl.statistics import Statistics


class SFTLossFn(PolicyLossFn):
    """Negative log-likelihood. Metrics: sft_loss."""

    metric_name = "sft_loss"

    def __init__(self, backend: str = "verl", loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend)
        self.loss_agg_mode = loss_agg_mode
        self.loss_fn = NLLLoss(self._config())

    def _config(self) -> NLLLossConfig:
        return NLLLossConfig(aggregation=aggregation(self.loss_agg_mode))

    @trinity_call
    def __call__(self, logprob: Tensor, action_mask: Tensor, *, within: Step) -> Result:
        loss, metrics = self.share(dense_batch(logprob, action_mask, step=within))
        return loss, reported(metrics, within)

    def share(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        loss = scaled(self.loss_fn.compute(batch)[0], batch, self.loss_agg_mode)
        return loss, {self.metric_name: Metric("share", loss)}


class SFTISLossFn(SFTLossFn):
    """SFT weighted by the token's probability, −sg[e^l]·l. Metrics: sft_is_loss. Paper: arXiv 2508.05629."""

    metric_name = "sft_is_loss"

    def _config(self) -> NLLLossConfig:
        return NLLLossConfig("probability", aggregation=aggregation(self.loss_agg_mode))


class SFTPhiLossFn(SFTLossFn):
    """SFT weighted by φ(p) = p·(1 − p), −sg[φ(e^l)]·min(l, log cutoff_prob). Paper: arXiv 2508.11408.

    cutoff_prob: in (0, 1]; more likely tokens have no gradient. Metrics: sft_phi_loss.
    """

    metric_name = "sft_phi_loss"

    def __init__(self, backend: str = "verl", loss_agg_mode: str = "token-mean", cutoff_prob: float = 1.0) -> None:
        self.cutoff_prob = cutoff_prob
        super().__init__(backend, loss_agg_mode)

    def _config(self) -> NLLLossConfig:
        return NLLLossConfig("phi", self.cutoff_prob, aggregation=aggregation(self.loss_agg_mode))


class DPOLossFn(PolicyLossFn):
    """DPO (cDPO with label_smoothing) of rows chosen, rejected, chosen, ...; all pairs act as one.

    The origin sums the log-ratios of all pairs before the sigmoid (Q36), so it is DPO only for a step of one pair; the
    library's `DPOLossFn` has the mean over pairs. With the counts of the step it needs `statistics`, `collect`'s reduced
    result.
    Metrics: chosen_reward, rejected_reward (β times the sums), accuracy_mean, dpo_loss. Paper: arXiv 2305.18290.
    """

    def __init__(self, backend: str = "verl", beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        super().__init__(backend)
        self.beta, self.label_smoothing = beta, label_smoothing

    @trinity_call
    def __call__(self, logprob: Tensor, ref_logprob: Tensor, action_mask: Tensor, *, within: Step) -> Result:
        step, statistics = within.with_statistics(), within.statistics
        batch = dense_batch(logprob, action_mask, {"ref": ref_logprob}, step)
        chosen, rejected = self._sums(batch)
        part = 1.0 if statistics is None else len(logprob) / batch.counts.seqs
        if statistics is not None:  # the sums of the step, with the gradient of this rank's sums
            chosen = straight_through(statistics["chosen"].to(chosen.device), chosen)
            rejected = straight_through(statistics["rejected"].to(rejected.device), rejected)
        loss_of_step = (
            dpo(chosen, rejected, self.beta, self.label_smoothing).to(batch.logprobs.dtype) / batch.local.layout.cp_size
        )
        loss = straight_through(loss_of_step * part, loss_of_step)
        here, weights = torch.ones_like(chosen, dtype=torch.bool), torch.ones_like(chosen)
        metrics = {
            "chosen_reward": sequence_mean(batch, self.beta * chosen * part, here, weights),
            "rejected_reward": sequence_mean(batch, self.beta * rejected * part, here, weights),
            "accuracy_mean": sequence_mean(batch, (chosen > rejected) * part, here, weights),
            "dpo_loss": Metric("share", loss),
        }
        return loss, reported(metrics, step)

    @torch.no_grad()
    @trinity_call
    def collect(self, logprob: Tensor, ref_logprob: Tensor, action_mask: Tensor, *, within: Step) -> Statistics:
        """Collect this micro-batch's part of the step's statistics; `+` joins micro-batches, then `reduce`."""
        batch = dense_batch(logprob, action_mask, {"ref": ref_logprob}, Step(context_group=within.context_group))
        chosen, rejected = self._sums(batch)
        here, weights = torch.ones_like(chosen, dtype=torch.bool), torch.ones_like(chosen)
        sums = {"chosen": chosen, "rejected": rejected}
        return Statistics({name: sequence_mean(batch, value, here, weights).value for name, value in sums.items()})

    def _sums(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Sum the log-ratios of all chosen, and of all rejected tokens: 0-dim, float64."""
        per_row = response_sum(batch, batch.logprobs - batch["ref"])
        return per_row[::2].sum(), per_row[1::2].sum()
