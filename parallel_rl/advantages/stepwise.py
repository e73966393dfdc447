"""Estimators for agents: a row is a step of a run, and the runs of a task may be on any data rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from parallel_rl.advantages.base import in_unit
from parallel_rl.advantages.grouped import GRPO, DrGRPO, GroupedEstimator
from parallel_rl.advantages.returns import reverse_scan
from parallel_rl.advantages.table import SampleTable
from parallel_rl.config.strict import at_least

if TYPE_CHECKING:
    from torch import Tensor


class _Runs:
    """Steps of a table by run, in order."""

    def __init__(self, table: SampleTable) -> None:
        steps, runs = table.columns["step_ids"], table.columns["run_ids"]
        self.order = steps.argsort(stable=True)
        self.table = SampleTable(table.rewards[self.order], runs[self.order])
        self.tasks = torch.empty_like(self.table.names)
        self.tasks[self.table.index] = table.group_ids[self.order]
        split = self.tasks[self.table.index] != table.group_ids[self.order]
        if split.any():
            raise ValueError(
                f"run {int(self.table.group_ids[split][0])} has steps in several groups; a run is of one task"
            )
        twice = self.table.spread(steps[self.order].double(), torch.nan).diff(dim=1) == 0
        if twice.any():
            run = int(self.table.names[twice.any(1)][0])
            raise ValueError(f"run {run} has two steps of one number; step_ids order a run's steps")

    def to_steps(self, x: Tensor) -> Tensor:
        """Expand [runs] or [runs, steps] to [M]."""
        found = torch.empty_like(self.table.rewards)
        found[self.order] = x[self.table.index] if x.dim() == 1 else x[self.table.index, self.table.place]
        return found


@dataclass(frozen=True, kw_only=True)
class StepwiseGRPO(GroupedEstimator, name="stepwise_grpo"):
    """Give every step of a run the GRPO advantage of the run's last reward among the runs of its task.

    Attributes:
        normalize: "std" divides by the unbiased deviation over the task's runs + eps; "none".
        eps: see `normalize`.
        per_step: divide by the number of steps of the run.
        singleton: for a task with one run.
    """

    normalize: Literal["std", "none"] = "std"
    eps: float = 1e-6
    per_step: bool = False

    fields: ClassVar[tuple[str, ...]] = ("rewards", "group_ids", "run_ids", "step_ids", "token_mask")

    def scores(self, table: SampleTable) -> Tensor:
        """Return [M] the scores of the runs, one per step.

        Raises:
            ValueError: a run in two groups, two steps of one number, or a task of one run where `singleton` is "error".
        """
        runs = _Runs(table)
        count = runs.table.size
        last = runs.table.rows.gather(1, count[:, None] - 1)[:, 0]
        one = GRPO(normalize=self.normalize, eps=self.eps, singleton=self.singleton)
        scores = one.scores(SampleTable(last, runs.tasks))
        return runs.to_steps(scores / count if self.per_step else scores)


@dataclass(frozen=True, kw_only=True)
class GiGPO(GroupedEstimator, name="gigpo"):
    """A = A_episode + ω·A_step (GiGPO, arXiv 2505.10978).

        A_episode: the run's summed rewards compared with those of the runs of its task
        A_step: Σ_k γ^k r_{t+k} of the run from this step on, compared with the steps of its `state_ids`; 0 for a state seen
            once

    Attributes:
        normalize: both are r − mean ("none"), or (r − mean)/(unbiased std + eps).
        omega, gamma: ω and γ.
        eps: see `normalize`.
        singleton: for a task with one run.
    """

    normalize: Literal["none", "std"] = "none"
    omega: float = 1.0
    gamma: float = 1.0
    eps: float = 1e-6

    fields: ClassVar[tuple[str, ...]] = ("rewards", "group_ids", "run_ids", "step_ids", "state_ids", "token_mask")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, omega=0, eps=0)
        in_unit(self, "gamma")

    def scores(self, table: SampleTable) -> Tensor:
        """Return [M] the scores of the steps.

        Raises:
            ValueError: a run in two groups, two steps of one number, or a task of one run where `singleton` is "error".
        """
        runs = _Runs(table)
        rewards = runs.table.rows.nan_to_num(0.0)
        episode = self._against(SampleTable(rewards.sum(1), runs.tasks), self.singleton)
        returns = runs.to_steps(reverse_scan(rewards, rewards.new_full((len(rewards),), self.gamma)))
        step = self._against(SampleTable(returns, table.columns["state_ids"]), "zero")
        return runs.to_steps(episode) + self.omega * step

    def _against(self, table: SampleTable, singleton: Literal["zero", "reward", "error"]) -> Tensor:
        if self.normalize == "none":
            return DrGRPO(singleton=singleton).scores(table)
        return GRPO(eps=self.eps, singleton=singleton).scores(table)
