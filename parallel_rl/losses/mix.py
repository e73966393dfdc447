"""Reinforcement learning and imitation in one step: MIX and CHORD."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from parallel_rl.counts import ValidCounts
from parallel_rl.losses.core.aggregation import UNIT_FIELDS
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.measures import count_true
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.core.truncated_policy import masked_stats
from parallel_rl.losses.nll import NLLLoss, NLLLossConfig
from parallel_rl.losses.policy import PolicyLossFn
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.statistics import Statistics


@dataclass(frozen=True)
class MuScheduleConfig:
    """μ over the steps of the optimizer: up from 0 to `peak` in `warmup_steps`, on a cosine down to `valley` in `decay_steps`.

    μ(s) = s/W·peak for s < W;  valley + (peak − valley)·½·(1 + cos(π·(s − W)/D)) for s < W + D;  then valley
    """

    peak: float = 0.1
    valley: float = 0.1
    warmup_steps: int = 0
    decay_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("peak", "valley"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} = {getattr(self, name)} must lie in [0, 1]: it is the weight of the expert side"
                )
        for name in ("warmup_steps", "decay_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 0")
        if self.warmup_steps == self.decay_steps == 0 and self.peak != self.valley:
            raise ValueError(
                f"peak = {self.peak} has no effect without warmup_steps or decay_steps; mu is {self.valley} (valley) at once"
            )


class MuSchedule:
    """The weight of the expert side, one value an optimizer step; its state is the number of steps made.

    >>> MuSchedule(MuScheduleConfig(peak=0.8, valley=0.2, warmup_steps=4, decay_steps=10)).at(2)
    0.4

    Paper: CHORD, arXiv 2508.11408.
    """

    def __init__(self, config: MuScheduleConfig) -> None:
        self.config = config
        self.steps = 0

    @property
    def mu(self) -> float:
        """μ of the present step."""
        return self.at(self.steps)

    def at(self, step: int) -> float:
        """μ of a step, counted from 0."""
        cfg = self.config
        if step < cfg.warmup_steps:
            return step / cfg.warmup_steps * cfg.peak
        after = step - cfg.warmup_steps
        if after >= cfg.decay_steps:
            return cfg.valley
        return cfg.valley + (cfg.peak - cfg.valley) * 0.5 * (1 + math.cos(math.pi * after / cfg.decay_steps))

    def step(self) -> None:
        """Advance the schedule; call it after each optimizer step."""
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        """{"steps": the number of optimizer steps made}."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from where `state_dict` was taken.

        Raises:
            ValueError: anything but what `state_dict` gives.
        """
        steps: object = state.get("steps")
        if set(state) != {"steps"} or not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ValueError(f"the state of a MuSchedule is {{'steps': a number ≥ 0}}, got {dict(state)}")
        self.steps = steps


@dataclass(frozen=True)
class MixLossConfig:
    """Options of `MixLossFn`.

    mu: the weight of the expert side, a number or a `MuScheduleConfig` (CHORD).
    policy: of the usual rows. supervised: of the expert rows; CHORD-φ has weighting "phi".
    """

    mu: float | MuScheduleConfig = 0.1
    policy: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    supervised: NLLLossConfig = field(default_factory=NLLLossConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.mu, MuScheduleConfig) and not 0 <= self.mu <= 1:
            raise ValueError(f"mu = {self.mu} must lie in [0, 1]: it is the weight of the expert side")
        if self.supervised.aggregation in UNIT_FIELDS:
            raise ValueError(
                f"supervised.aggregation = {self.supervised.aggregation!r} is of units that the experts' rows do not have; "
                "average them over tokens or sequences"
            )

    @property
    def schedule(self) -> MuScheduleConfig:
        return self.mu if isinstance(self.mu, MuScheduleConfig) else MuScheduleConfig(self.mu, self.mu)


@register_loss("mix")
class MixLossFn(LossFn[MixLossConfig]):
    """A policy loss on the policy's own rows and a supervised one on an expert's, each a mean over its own rows of the step.

        L = (1 − μ)·PolicyLoss(usual rows) + μ·NLL(expert rows)

    `data["expert_mask"]` [B] bool says which rows are an expert's; the fields of the policy loss are not read there, but must
    hold numbers. Both sides are normalised by their own counts over the whole step, which is what `statistics` brings; a
    side without a row contributes an exact 0. μ moves with `after_step`, called after each optimizer step.

    Metrics: loss, mu, usual/... of `PolicyLossFn`, expert/... of `NLLLoss`. Call and errors: see `LossFn`.

    Papers: Trinity-RFT arXiv 2505.17826 (MIX); CHORD arXiv 2508.11408.

    >>> import torch
    >>> from parallel_rl import MixLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2], [0, 3, 1]]), "token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2)}
    >>> data |= {"advantages": torch.ones(2, 3), "prev_logprobs": torch.full((2, 3), -1.5)}
    >>> data["expert_mask"] = torch.tensor([False, True])
    >>> loss_fn = MixLossFn({"mu": 0.2})
    >>> call = (torch.zeros(2, 3, 4), data, *count_valid(data))
    >>> loss, _ = loss_fn(*call, statistics=loss_fn.count(data))
    >>> round(loss.item(), 4)
    -0.6191
    """

    config_class = MixLossConfig

    @cached_property
    def usual(self) -> PolicyLossFn:
        """The loss of the policy's own rows."""
        return PolicyLossFn(self.config.policy)

    @cached_property
    def expert(self) -> NLLLoss:
        """The loss of the expert's rows."""
        return NLLLoss(self.config.supervised)

    @cached_property
    def mu_schedule(self) -> MuSchedule:
        """The schedule of μ; its state is the loss's."""
        return MuSchedule(self.config.schedule)

    @property
    def on_policy(self) -> bool:
        return self.usual.on_policy

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.mu_schedule.step()
        self.usual.after_step(_under("usual/", metrics))

    def state_dict(self) -> dict[str, float]:
        of_policy = {f"usual/{name}": value for name, value in self.usual.state_dict().items()}
        return {**self.mu_schedule.state_dict(), **of_policy}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.mu_schedule.load_state_dict({name: x for name, x in state.items() if not name.startswith("usual/")})
        self.usual.load_state_dict(_under("usual/", state))

    @cached_property
    def requirements(self) -> Requirements:
        usual = self.usual.requirements
        fields = (*usual.fields, Field("expert_mask", per="sequence", dtype="integer"))
        return replace(usual, fields=fields, counted=True, truncatable=False)

    def count_from(self, batch: TokenBatch) -> Statistics:
        sums = {}
        for name, rows in _rows(batch).items():
            sums[f"{name}_sequences"] = count_true(batch, batch.sequence_mask & rows).value
            sums[f"{name}_tokens"] = count_true(batch, batch.local.valid & rows[:, None]).value
        counted = Statistics(sums)
        if self.usual.requirements.counted:
            counted |= self.usual.count_from(_narrowed(batch, _rows(batch)["usual"], batch.counts))
        return counted

    def collect_from(self, batch: TokenBatch) -> Statistics:
        return self.usual.collect_from(_narrowed(batch, _rows(batch)["usual"], batch.counts))

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        assert batch.statistics is not None
        mu, rows = self.mu_schedule.mu, _rows(batch)
        usual, of_usual = self.usual.compute(_narrowed(batch, rows["usual"], _counts(batch.statistics, "usual")))
        expert, of_expert = self.expert.compute(_narrowed(batch, rows["expert"], _counts(batch.statistics, "expert")))
        loss = (1 - mu) * usual + mu * expert
        metrics = {f"usual/{key}": of_usual.parts(key) for key in of_usual}
        metrics |= {f"expert/{key}": of_expert.parts(key) for key in of_expert}
        of_both = {"loss": Metric("share", loss), "mu": Metric("max", torch.full_like(loss, mu, requires_grad=False))}
        return loss, Metrics(of_both | metrics)


def _under(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    """The values whose names begin so, without that."""
    return {name.removeprefix(prefix): x for name, x in values.items() if name.startswith(prefix)}


def _rows(batch: TokenBatch) -> dict[str, Tensor]:
    """[B] bool of each side."""
    expert = batch.local.data["expert_mask"].bool()
    return {"usual": ~expert, "expert": expert}


def _counts(statistics: Statistics, side: str) -> ValidCounts:
    """Counts of one side over the whole step."""
    return ValidCounts(statistics[f"{side}_sequences"].clamp(min=1), statistics[f"{side}_tokens"].clamp(min=1))


def _narrowed(batch: TokenBatch, rows: Tensor, counts: ValidCounts) -> TokenBatch:
    """The batch as if no other row carried loss."""
    data = {**batch.local.data, "sample_mask": batch.sequence_mask & rows}
    local, stats = replace(batch.local, data=data, counts=counts), batch.output.stats
    return TokenBatch(local, ModelOutput() if stats is None else ModelOutput(masked_stats(stats, local.mask)))
