"""Trinity-RFT's mixtures of a policy loss on its own rows and a supervised loss on an expert's: MIX and CHORD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.compat.dense import Count, Step, as_count, dense_batch
from parallel_rl.compat.trinity.base import PolicyLossFn, Result, reported, trinity_call
from parallel_rl.compat.trinity.policy import PPOPolicyLossFn
from parallel_rl.compat.trinity.supervised import SFTLossFn, SFTPhiLossFn
from parallel_rl.losses.mix import MuSchedule, MuScheduleConfig
from parallel_rl.metrics import Metric
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIDES = ("usual", "expert")


class MixtureLossFn(PolicyLossFn):
    """(1 − μ)·n_u·w_u·PPO(usual rows) + μ·n_x·w_x·SFT(expert rows), each side a mean over its own rows.

    The weights w undo the scaling of Trinity's older trainer (Q32): GA/U with GA = ppo_mini_batch_size //
    ppo_micro_batch_size_per_gpu, or with use_dynamic_bsz E/(B·U), E = ppo_mini_batch_size // ngpus_trainer; U =
    train_batch_size_usual // ngpus_trainer, and w_x likewise with train_batch_size_expert. Each must be at least 1 in the end.
    """

    grpo_loss_fn: PPOPolicyLossFn
    sft_loss_fn: SFTLossFn
    #: whether μ is a metric, and those of a side without a row are there too
    scheduled = False

    def _configure(
        self,
        clip_range: float | None,
        clip_range_low: float | None,
        clip_range_high: float | None,
        use_dynamic_bsz: bool | None,
        ppo_mini_batch_size: int,
        ppo_micro_batch_size_per_gpu: int,
        ngpus_trainer: int,
        train_batch_size_usual: int,
        train_batch_size_expert: int,
        grpo_loss_agg_mode: str,
    ) -> None:
        self.use_dynamic_bsz = use_dynamic_bsz
        self.experience_per_gpu = ppo_mini_batch_size // ngpus_trainer
        self.gradient_accumulation = ppo_mini_batch_size // ppo_micro_batch_size_per_gpu
        self.train_batch_size_usual = train_batch_size_usual // ngpus_trainer
        self.train_batch_size_expert = train_batch_size_expert // ngpus_trainer
        for side in SIDES:
            if getattr(self, f"train_batch_size_{side}") < 1:
                raise ValueError(
                    f"train_batch_size_{side} // ngpus_trainer = 0; it divides the weight of the {side} rows"
                )
        self.grpo_loss_fn = PPOPolicyLossFn(
            clip_range=clip_range,
            clip_range_low=clip_range_low,
            clip_range_high=clip_range_high,
            loss_agg_mode=grpo_loss_agg_mode,
        )

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
        rows = {"usual": ~expert_mask.bool(), "expert": expert_mask.bool()}
        fields = {"prev_logprobs": old_logprob, "generation_logprobs": logprob.detach(), "advantages": advantages}
        total = as_count(len(logprob) if step.seqs is None else step.seqs, logprob.device)
        metrics: dict[str, Metric] = {}
        loss, present = torch.zeros((), dtype=math_dtype(logprob.dtype), device=logprob.device), {}
        for (side, fn), part in zip(self._sides.items(), (1 - mu, mu), strict=True):
            batch = dense_batch(logprob, action_mask, fields, step.of(side), rows=rows[side])
            mean, side_metrics = fn.share(batch)
            usual = getattr(self, f"train_batch_size_{side}")
            weight = (
                self.experience_per_gpu / (total * usual)
                if self.use_dynamic_bsz
                else self.gradient_accumulation / usual
            )
            count = batch.counts.seqs * weight
            loss = loss + (part * mean * count).to(mean.dtype)
            metrics |= {f"{side}/{key}": each._replace(value=each.value * count) for key, each in side_metrics.items()}
            present[side] = batch.count(batch.sequence_mask)
        metrics["loss"] = Metric("share", loss)
        if self.scheduled:
            metrics["mu"] = Metric("max", torch.full_like(loss, mu))
        if not step.alone or self.scheduled:
            return loss, reported(metrics, step)
        floats = dict(reported({**metrics, **present}, step))
        counts = {side: floats.pop(side) for side in SIDES}
        return loss, {key: value for key, value in floats.items() if counts.get(key.split("/")[0], 1)}

    @property
    def _sides(self) -> dict[str, PPOPolicyLossFn | SFTLossFn]:
        return {"usual": self.grpo_loss_fn, "expert": self.sft_loss_fn}

    @torch.no_grad()
    @trinity_call
    def collect(
        self,
        logprob: Tensor,
        action_mask: Tensor,
        expert_mask: Tensor,
        *,
        context_parallel_group: ProcessGroup | None = None,
        **kwargs: object,
    ) -> Statistics:
        """This micro-batch's part of the counts of each side of the step; `+` joins micro-batches, then `reduce`."""
        sums: dict[str, Tensor] = {}
        step = Step(context_group=context_parallel_group)
        for side, rows in (("usual", ~expert_mask.bool()), ("expert", expert_mask.bool())):
            batch = dense_batch(logprob, action_mask, step=step, rows=rows)
            sums |= {f"{side}_seqs": batch.count(rows).value, f"{side}_toks": batch.count(batch.valid).value}
        return Statistics(sums)


class MIXPolicyLossFn(MixtureLossFn):
    """PPO on the policy's rows and SFT on an expert's (`expert_mask` [B] bool), mixed by mu; see `MixtureLossFn`.

    With the counts of the step it needs `statistics`, the reduced result of `collect`.

    Metrics: usual/... of `PPOPolicyLossFn`, expert/... of `SFTLossFn` (each only where the side has a row), loss.

    Paper: arXiv 2505.17826.
    """

    def __init__(
        self,
        backend: str = "verl",
        mu: float = 0.1,
        clip_range: float | None = None,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        use_dynamic_bsz: bool | None = None,
        ppo_mini_batch_size: int = 1,
        ppo_micro_batch_size_per_gpu: int = 1,
        ngpus_trainer: int = 1,
        train_batch_size_usual: int = 1,
        train_batch_size_expert: int = 1,
        loss_agg_mode: str = "token-mean",
        sft_loss_agg_mode: str | None = None,
        grpo_loss_agg_mode: str | None = None,
    ) -> None:
        super().__init__(backend)
        self.mu = mu
        self._configure(
            clip_range,
            clip_range_low,
            clip_range_high,
            use_dynamic_bsz,
            ppo_mini_batch_size,
            ppo_micro_batch_size_per_gpu,
            ngpus_trainer,
            train_batch_size_usual,
            train_batch_size_expert,
            grpo_loss_agg_mode or loss_agg_mode,
        )
        self.sft_loss_fn = SFTLossFn(loss_agg_mode=sft_loss_agg_mode or loss_agg_mode)

    @trinity_call
    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        *,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
        statistics: Statistics | None = None,
        **kwargs: object,
    ) -> Result:
        """The loss and its metrics, see `PolicyLossFn`.

        Raises:
            ValueError: counts of the step without `statistics`, or the other way round.
        """
        step = Step(global_valid_seqs, global_valid_toks, context_parallel_group, statistics)
        return self._mixture(self.mu, logprob, old_logprob, action_mask, advantages, expert_mask, step)

    @classmethod
    def default_args(cls) -> dict[str, object]:
        return {"mu": 0.1, "clip_range": 0.2, "loss_agg_mode": "token-mean"}


class MIXCHORDPolicyLossFn(MixtureLossFn):
    """MIX with μ by the step of the optimizer (warm-up to mu_peak, cosine to mu_valley) and SFT-phi on the expert's rows.

    `step` [B] holds the number of the optimizer step, the same in all rows. A side without a row contributes 0, where the
    origin is NaN in the seq-mean modes (Q37). With the counts of the step it needs `statistics`, the reduced result of
    `collect`.

    Metrics: usual/..., expert/..., loss, mu. Paper: CHORD, arXiv 2508.11408.
    """

    scheduled = True

    def __init__(
        self,
        backend: str = "verl",
        mu_warmup_steps: int = 0,
        mu_decay_steps: int = 0,
        mu_peak: float = 0.1,
        mu_valley: float = 0.1,
        enable_phi_function: bool = True,
        clip_range: float | None = None,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        use_dynamic_bsz: bool | None = None,
        ppo_mini_batch_size: int = 1,
        ppo_micro_batch_size_per_gpu: int = 1,
        ngpus_trainer: int = 1,
        train_batch_size_usual: int = 1,
        train_batch_size_expert: int = 1,
        loss_agg_mode: str = "token-mean",
        sft_loss_agg_mode: str | None = None,
        grpo_loss_agg_mode: str | None = None,
    ) -> None:
        super().__init__(backend)
        self.mu_warmup_steps, self.mu_decay_steps = mu_warmup_steps, mu_decay_steps
        self.mu_peak, self.mu_valley, self.enable_phi_function = mu_peak, mu_valley, enable_phi_function
        self._configure(
            clip_range,
            clip_range_low,
            clip_range_high,
            use_dynamic_bsz,
            ppo_mini_batch_size,
            ppo_micro_batch_size_per_gpu,
            ngpus_trainer,
            train_batch_size_usual,
            train_batch_size_expert,
            grpo_loss_agg_mode or loss_agg_mode,
        )
        supervised = SFTPhiLossFn if enable_phi_function else SFTLossFn
        self.sft_loss_fn = supervised(loss_agg_mode=sft_loss_agg_mode or loss_agg_mode)
        moves = mu_warmup_steps or mu_decay_steps
        self.schedule = MuSchedule(
            MuScheduleConfig(mu_peak if moves else mu_valley, mu_valley, mu_warmup_steps, mu_decay_steps)
        )

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
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
        statistics: Statistics | None = None,
        **kwargs: object,
    ) -> Result:
        """The loss and its metrics, see `PolicyLossFn`; `step` is read on the host.

        Raises:
            ValueError: rows of different steps; counts of the step without `statistics`, or the other way round.
        """
        if len(step) != len(logprob) or (checks_values(step) and len(step) and not bool((step == step[0]).all())):
            raise ValueError(f"step must hold one number in all {len(logprob)} rows, got {step.tolist()}")
        mu = self.schedule.at(int(step[0])) if len(step) else self.mu_valley
        of_step = Step(global_valid_seqs, global_valid_toks, context_parallel_group, statistics)
        return self._mixture(mu, logprob, old_logprob, action_mask, advantages, expert_mask, of_step)

    @classmethod
    def default_args(cls) -> dict[str, object]:
        return {
            "mu_warmup_steps": 0,
            "mu_decay_steps": 0,
            "mu_peak": 0.1,
            "mu_valley": 0.1,
            "clip_range": 0.2,
            "enable_phi_function": True,
            "loss_agg_mode": "token-mean",
        }
