"""Reinforcement learning and imitation in one step: MIX and CHORD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from parallel_rl.config.strict import positive
from parallel_rl.losses.core.component import Component, ComponentsLoss
from parallel_rl.losses.core.data_view import DataView
from parallel_rl.losses.entropy_bonus import scheduled
from parallel_rl.losses.nll import NLLLoss, NLLLossConfig
from parallel_rl.losses.policy import PolicyLossFn
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric


@dataclass(frozen=True)
class MuScheduleConfig:
    """μ over the optimizer's steps: up from 0 to `peak`, then on a cosine down to `valley`.

    μ(s) = s/W·peak for s < W;  valley + (peak − valley)·½·(1 + cos(π·(s − W)/D)) for s < W + D;  then valley

    peak: μ after the warm-up. valley: μ at the end. warmup_steps: W. decay_steps: D.
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
        positive(self, "warmup_steps", "decay_steps", zero=True)
        if self.warmup_steps == self.decay_steps == 0 and self.peak != self.valley:
            raise ValueError(
                f"peak = {self.peak} has no effect without warmup_steps or decay_steps; mu is {self.valley} (valley) at once"
            )


class MuSchedule:
    """Weight of the expert side, one value an optimizer step; its state is the number of steps made.

    >>> MuSchedule(MuScheduleConfig(peak=0.8, valley=0.2, warmup_steps=4, decay_steps=10)).at(2)
    0.4

    Paper: CHORD, arXiv 2508.11408.
    """

    def __init__(self, config: MuScheduleConfig) -> None:
        self.config = config
        self.steps = 0

    @property
    def mu(self) -> float:
        return self.at(self.steps)

    def at(self, step: int) -> float:
        """Return μ of a step, counted from 0."""
        cfg = self.config
        return scheduled(step, 0.0, cfg.peak, cfg.valley, cfg.warmup_steps, cfg.decay_steps)

    def step(self) -> None:
        """Advance the schedule; call it after each optimizer step."""
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        """Return {"steps": the number of optimizer steps made}."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a `state_dict`; ValueError for anything else."""
        steps: object = state.get("steps")
        if set(state) != {"steps"} or not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ValueError(f"the state of a MuSchedule is {{'steps': a number ≥ 0}}, got {dict(state)}")
        self.steps = steps


@dataclass(frozen=True)
class MixLossConfig:
    """Options of `MixLossFn`.

    mu: weight of the expert side, a number or a `MuScheduleConfig` (CHORD).
    policy: options of the loss on the usual rows. supervised: options of the loss on the expert
        rows; CHORD-φ has weighting "phi".
    """

    mu: float | MuScheduleConfig = 0.1
    policy: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    supervised: NLLLossConfig = field(default_factory=NLLLossConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.mu, MuScheduleConfig) and not 0 <= self.mu <= 1:
            raise ValueError(f"mu = {self.mu} must lie in [0, 1]: it is the weight of the expert side")

    @property
    def schedule(self) -> MuScheduleConfig:
        return self.mu if isinstance(self.mu, MuScheduleConfig) else MuScheduleConfig(self.mu, self.mu)


@register_loss("mix")
class MixLossFn(ComponentsLoss[MixLossConfig]):
    """Policy loss on the policy's rows and supervised loss on an expert's; the local loss.

        L = (1 − μ)·PolicyLoss(usual rows) + μ·NLL(expert rows)

    `data["expert_mask"]` [B] bool marks the expert's rows; the policy loss's fields are not read there, but must hold
    numbers. Each side is divided by its own counts over the whole step (`statistics`); a side without a row contributes an
    exact 0. μ moves with `after_step`.

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
    def components(self) -> tuple[Component, ...]:
        options = self.options_of_components()
        usual, expert = PolicyLossFn(self.config.policy, **options), NLLLoss(self.config.supervised, **options)  # type: ignore[arg-type]
        rows = {"usual": "not expert_mask", "expert": "expert_mask"}
        return tuple(
            Component(name, loss, DataView(rows=rows[name])) for name, loss in (("usual", usual), ("expert", expert))
        )

    @cached_property
    def mu_schedule(self) -> MuSchedule:
        """Return the schedule of μ; its state is the loss's."""
        return MuSchedule(self.config.schedule)

    @property
    def coefficients(self) -> Mapping[str, float]:
        return {"usual": 1 - self.mu_schedule.mu, "expert": self.mu_schedule.mu}

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.mu_schedule.step()
        super().after_step(metrics)

    def state_dict(self) -> dict[str, float]:
        return {**self.mu_schedule.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.mu_schedule.load_state_dict({name: x for name, x in state.items() if "/" not in name})
        super().load_state_dict({name: x for name, x in state.items() if "/" in name})

    def own_metrics(self, loss: Tensor) -> dict[str, Metric]:
        return {"mu": Metric("max", torch.full_like(loss, self.mu_schedule.mu, requires_grad=False))}
