"""Trinity-RFT's losses with an expert's or labelled rows: SFT, SFT-IS, SFT-phi, DPO, and the mixtures MIX and CHORD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_rl.compat.dense import Step, as_count, dense_batch
from parallel_rl.compat.trinity.policy import (
    PolicyLossFn,
    PPOPolicyLossFn,
    Result,
    aggregation,
    reported,
    scaled,
    trinity_call,
)
from parallel_rl.functional.kl import straight_through
from parallel_rl.functional.preference import dpo
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import count_true, sequence_mean
from parallel_rl.losses.mix import MuSchedule, MuScheduleConfig
from parallel_rl.losses.nll import NLLLoss, NLLLossConfig
from parallel_rl.losses.preference import response_sum
from parallel_rl.metrics import Metric
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype


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


SIDES = ("usual", "expert")


class MixtureLossFn(PolicyLossFn):
    """(1 − μ)·n_u·w_u·PPO(usual rows) + μ·n_x·w_x·SFT(expert rows), each side a mean over its own rows.

    The weights w undo the scaling of Trinity's older trainer (Q32): w_u = GA/U with GA = ppo_mini_batch_size //
    ppo_micro_batch_size_per_gpu, or with use_dynamic_bsz E/(B·U), E = ppo_mini_batch_size // ngpus_trainer. U =
    train_batch_size_usual // ngpus_trainer ≥ 1, for w_x of train_batch_size_expert. With counts it needs `collect`'s result.
    """

    backend: str
    clip_range: float | None
    clip_range_low: float | None
    clip_range_high: float | None
    use_dynamic_bsz: bool | None
    ppo_mini_batch_size: int
    ppo_micro_batch_size_per_gpu: int
    ngpus_trainer: int
    train_batch_size_usual: int
    train_batch_size_expert: int
    loss_agg_mode: str
    sft_loss_agg_mode: str | None
    grpo_loss_agg_mode: str | None
    enable_phi_function = False
    #: whether metrics include μ, and sides without a row
    scheduled = False

    def __post_init__(self) -> None:
        super().__init__(self.backend)
        self.experience_per_gpu = self.ppo_mini_batch_size // self.ngpus_trainer
        self.gradient_accumulation = self.ppo_mini_batch_size // self.ppo_micro_batch_size_per_gpu
        for side in SIDES:
            name = f"train_batch_size_{side}"
            setattr(self, name, getattr(self, name) // self.ngpus_trainer)
            if getattr(self, name) < 1:
                raise ValueError(f"{name} // ngpus_trainer = 0; it divides the weight of the {side} rows")
        clip = self.clip_range, self.clip_range_low, self.clip_range_high
        self.grpo_loss_fn = PPOPolicyLossFn("verl", *clip, loss_agg_mode=self.grpo_loss_agg_mode or self.loss_agg_mode)
        supervised = SFTPhiLossFn if self.enable_phi_function else SFTLossFn
        self.sft_loss_fn = supervised(loss_agg_mode=self.sft_loss_agg_mode or self.loss_agg_mode)

    def _mixture(
        self,
        mu: float,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        step: Step,
    ) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        step = step.with_statistics()
        fields = {"prev_logprobs": old_logprob, "generation_logprobs": logprob.detach(), "advantages": advantages}
        total = as_count(len(logprob) if step.seqs is None else step.seqs, logprob.device)
        metrics: dict[str, Metric] = {}
        loss, present = torch.zeros((), dtype=math_dtype(logprob.dtype), device=logprob.device), {}
        fns: dict[str, PPOPolicyLossFn | SFTLossFn] = {"usual": self.grpo_loss_fn, "expert": self.sft_loss_fn}
        for (side, rows), factor in zip(_rows(expert_mask).items(), (1 - mu, mu), strict=True):
            batch = dense_batch(logprob, action_mask, fields, step.of(side), rows=rows)
            mean, side_metrics = fns[side].share(batch)
            size, of_gpu = getattr(self, f"train_batch_size_{side}"), self.experience_per_gpu
            weight = of_gpu / (total * size) if self.use_dynamic_bsz else self.gradient_accumulation / size
            count = batch.counts.seqs * weight
            loss = loss + (factor * mean * count).to(mean.dtype)
            metrics |= {f"{side}/{key}": part._replace(value=part.value * count) for key, part in side_metrics.items()}
            present[side] = count_true(batch, batch.sequence_mask)
        metrics["loss"] = Metric("share", loss)
        if self.scheduled:
            metrics["mu"] = Metric("max", torch.full_like(loss, mu))
        if not step.alone or self.scheduled:
            return loss, reported(metrics, step)
        floats = dict(reported({**metrics, **present}, step))
        counts = {side: floats.pop(side) for side in SIDES}
        return loss, {key: value for key, value in floats.items() if counts.get(key.split("/")[0], 1)}

    @torch.no_grad()
    @trinity_call
    def collect(self, logprob: Tensor, action_mask: Tensor, expert_mask: Tensor, *, within: Step) -> Statistics:
        """Count each side's part of this micro-batch; `+` joins micro-batches, then `reduce`."""
        sums: dict[str, Tensor] = {}
        for side, rows in _rows(expert_mask).items():
            batch = dense_batch(logprob, action_mask, step=Step(context_group=within.context_group), rows=rows)
            sums[f"{side}_seqs"] = count_true(batch, rows).value
            sums[f"{side}_toks"] = count_true(batch, batch.valid).value
        return Statistics(sums)


@dataclass(eq=False, repr=False)
class MIXPolicyLossFn(MixtureLossFn):
    """PPO on the policy's rows and SFT on an expert's (`expert_mask` [B] bool). Paper: arXiv 2505.17826.

    Metrics: usual/... of `PPOPolicyLossFn`, expert/... of `SFTLossFn` (if the side has a row), loss.
    """

    backend: str = "verl"
    mu: float = 0.1
    clip_range: float | None = None
    clip_range_low: float | None = None
    clip_range_high: float | None = None
    use_dynamic_bsz: bool | None = None
    ppo_mini_batch_size: int = 1
    ppo_micro_batch_size_per_gpu: int = 1
    ngpus_trainer: int = 1
    train_batch_size_usual: int = 1
    train_batch_size_expert: int = 1
    loss_agg_mode: str = "token-mean"
    sft_loss_agg_mode: str | None = None
    grpo_loss_agg_mode: str | None = None

    @trinity_call
    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        *,
        within: Step,
    ) -> Result:
        return self._mixture(self.mu, logprob, old_logprob, action_mask, advantages, expert_mask, within)

    @classmethod
    def default_args(cls) -> dict[str, object]:
        return {"mu": 0.1, "clip_range": 0.2, "loss_agg_mode": "token-mean"}


@dataclass(eq=False, repr=False)
class MIXCHORDPolicyLossFn(MixtureLossFn):
    """MIX with SFT-phi on the expert's rows and μ by the step: warm-up to mu_peak, cosine to mu_valley.

    `step` [B] holds the number of the optimizer step. A side without a row contributes 0 (Q37: the origin is NaN in the
    seq-mean modes). Metrics: usual/..., expert/..., loss, mu. Paper: CHORD, arXiv 2508.11408.
    """

    scheduled = True
    backend: str = "verl"
    mu_warmup_steps: int = 0
    mu_decay_steps: int = 0
    mu_peak: float = 0.1
    mu_valley: float = 0.1
    enable_phi_function: bool = True
    clip_range: float | None = None
    clip_range_low: float | None = None
    clip_range_high: float | None = None
    use_dynamic_bsz: bool | None = None
    ppo_mini_batch_size: int = 1
    ppo_micro_batch_size_per_gpu: int = 1
    ngpus_trainer: int = 1
    train_batch_size_usual: int = 1
    train_batch_size_expert: int = 1
    loss_agg_mode: str = "token-mean"
    sft_loss_agg_mode: str | None = None
    grpo_loss_agg_mode: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        peak = self.mu_peak if self.mu_warmup_steps or self.mu_decay_steps else self.mu_valley
        self.schedule = MuSchedule(MuScheduleConfig(peak, self.mu_valley, self.mu_warmup_steps, self.mu_decay_steps))

    @trinity_call
    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        step: Tensor,
        *,
        within: Step,
    ) -> Result:
        """Return the loss and its metrics; ValueError for rows of different steps; `step` is read on the host."""
        if len(step) != len(logprob) or (checks_values(step) and len(step) and not bool((step == step[0]).all())):
            raise ValueError(f"step must hold one number in all {len(logprob)} rows, got {step.tolist()}")
        mu = self.schedule.at(int(step[0])) if len(step) else self.mu_valley
        return self._mixture(mu, logprob, old_logprob, action_mask, advantages, expert_mask, within)

    @classmethod
    def default_args(cls) -> dict[str, object]:
        schedule = {"mu_warmup_steps": 0, "mu_decay_steps": 0, "mu_peak": 0.1, "mu_valley": 0.1}
        return {**schedule, "clip_range": 0.2, "enable_phi_function": True, "loss_agg_mode": "token-mean"}


def _rows(expert_mask: Tensor) -> dict[str, Tensor]:
    return {"usual": ~expert_mask.bool(), "expert": expert_mask.bool()}
