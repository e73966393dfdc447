"""Estimators that compare a sample, or a step of a run, with its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from parallel_rl.advantages.base import AdvantageEstimator, Whitening, in_unit
from parallel_rl.advantages.returns import reverse_scan
from parallel_rl.advantages.table import SampleTable
from parallel_rl.config.strict import at_least

if TYPE_CHECKING:
    from torch import Tensor

Singleton = Literal["zero", "reward", "error"]


@dataclass(frozen=True, kw_only=True)
class GroupedEstimator(AdvantageEstimator):
    """Base of the estimators by group.

    singleton: score of a group of one, or "error".
    """

    singleton: Singleton = "error"

    fields: ClassVar[tuple[str, ...]] = ("rewards", "group_ids", "token_mask")
    grouped: ClassVar[bool] = True

    def compare(self, table: SampleTable) -> Tensor:
        """Compute [M] scores; those of a group of one are not used."""
        return table.centred

    def scores(self, table: SampleTable) -> Tensor:
        if self.singleton == "error" and bool(table.alone.any()):
            group = int(table.group_ids[table.alone][0])
            raise ValueError(f"group {group} has one sample; set singleton to 'zero' or 'reward', or sample more")
        alone = table.rewards if self.singleton == "reward" else torch.zeros_like(table.rewards)
        return torch.where(table.alone, alone, self.compare(table))


@dataclass(frozen=True, kw_only=True)
class GRPO(GroupedEstimator, name="grpo"):
    """A_i = (r_i − baseline) / (deviation + eps) (GRPO, arXiv 2402.03300).

    Attributes:
        normalize: the deviation: "std" of the group, unbiased (verl, Trinity-RFT, OpenRLHF, LightRFT, slime); "population" of
            the group (n instead of n − 1); "leave_one_out": of the group without the sample, unbiased (NeMo-RL), and no
            division if this deviation is only rounding or n ≤ 2; "batch": unbiased, of all rewards of the step (arXiv
            2508.08221); "none": no division (Dr. GRPO).
        baseline: the "mean" of the group, or "leave_one_out", the mean of the others. eps: added to the deviation.
    """

    normalize: Literal["std", "population", "leave_one_out", "batch", "none"] = "std"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, eps=0)

    def compare(self, table: SampleTable) -> Tensor:
        difference = table.above_others if self.baseline == "leave_one_out" else table.centred
        if self.normalize == "none":
            return difference
        if self.normalize == "leave_one_out":
            deviation = table.deviation_of_others()
            return torch.where(deviation > 0, difference / (deviation + self.eps), difference)
        if self.normalize == "batch":
            variance = (table.rewards - table.rewards.mean()).square().sum() / max(len(table.rewards) - 1, 1)
            deviation = variance.sqrt()
        else:
            deviation = table.deviation(0 if self.normalize == "population" else 1)
        return torch.where(table.constant, 0.0, difference / (deviation + self.eps))


@dataclass(frozen=True, kw_only=True)
class GroupNorm(GroupedEstimator, name="group_norm"):
    """A_i = (r_i − mean) / (unbiased std + eps): GRPO with the eps of OpenRLHF and LightRFT.

    eps: added to the deviation.
    """

    eps: float = 1e-9

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, eps=0)

    def compare(self, table: SampleTable) -> Tensor:
        return torch.where(table.constant, 0.0, table.centred / (table.deviation() + self.eps))


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GroupedEstimator, name="dr_grpo"):
    """A_i = r_i − mean of the group (Dr. GRPO, arXiv 2503.20783); its loss divides by a constant length."""


@dataclass(frozen=True, kw_only=True)
class RLOO(GroupedEstimator, name="rloo"):
    """A_i = r_i − mean_{j≠i} r_j (RLOO, arXiv 2402.14740)."""

    def compare(self, table: SampleTable) -> Tensor:
        return table.above_others


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(GroupedEstimator, name="reinforce_plus_plus_baseline"):
    """A_i = r_i − mean of the group, whitened over the step's tokens (arXiv 2501.03262)."""

    whiten: Whitening = "population"


@dataclass(frozen=True, kw_only=True)
class OPMD(GroupedEstimator, name="opmd"):
    """A_i = r_i − b of the group (OPMD, arXiv 2505.17826): b its mean, or τ·(logsumexp(r/τ) − log n).

    baseline: b, the "mean", or "logavgexp", the formula with τ. tau: τ of "logavgexp"; None: 1.
    """

    baseline: Literal["mean", "logavgexp"] = "mean"
    tau: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau is not None and self.baseline == "mean":
            raise ValueError(f"tau = {self.tau} has no effect with baseline = 'mean'; leave it out")
        if self.tau is not None and not self.tau > 0:
            raise ValueError(f"tau = {self.tau} must be above 0")

    def compare(self, table: SampleTable) -> Tensor:
        if self.baseline == "mean":
            return table.centred
        tau = self.tau or 1.0
        below = (table.rewards - table.top) / tau  # at most 0: no overflow
        mean = (table.sums(below.exp()) / table.size)[table.index]
        return torch.where(table.constant, 0.0, tau * (below - mean.log()))


@dataclass(frozen=True, kw_only=True)
class AsymRE(GroupedEstimator, name="asymre"):
    """A_i = r_i − (mean of the group + shift) (AsymRE, arXiv 2506.20520): a constant group gets −shift.

    baseline_shift: below 0, good samples count more than bad ones.
    """

    baseline_shift: float = -0.1

    def compare(self, table: SampleTable) -> Tensor:
        return table.centred - self.baseline_shift


class _Runs:
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
        steps = torch.empty_like(self.table.rewards)
        steps[self.order] = x[self.table.index] if x.dim() == 1 else x[self.table.index, self.table.place]
        return steps


@dataclass(frozen=True, kw_only=True)
class StepwiseGRPO(GroupedEstimator, name="stepwise_grpo"):
    """Give every step of a run the GRPO advantage of the run's last reward among the runs of its task.

    normalize: "std" divides by the unbiased deviation over the task's runs + eps; "none". eps: see `normalize`. per_step:
    divide by the number of steps of the run. singleton: the score for a task with one run.
    """

    normalize: Literal["std", "none"] = "std"
    eps: float = 1e-6
    per_step: bool = False

    fields: ClassVar[tuple[str, ...]] = ("rewards", "group_ids", "run_ids", "step_ids", "token_mask")

    def scores(self, table: SampleTable) -> Tensor:
        runs = _Runs(table)
        count = runs.table.size
        last = runs.table.rows.gather(1, count[:, None] - 1)[:, 0]
        grpo = GRPO(normalize=self.normalize, eps=self.eps, singleton=self.singleton)
        scores = grpo.scores(SampleTable(last, runs.tasks))
        return runs.to_steps(scores / count if self.per_step else scores)


@dataclass(frozen=True, kw_only=True)
class GiGPO(GroupedEstimator, name="gigpo"):
    """A = A_episode + ω·A_step (GiGPO, arXiv 2505.10978).

        A_episode: the run's summed rewards compared with those of the runs of its task
        A_step: Σ_k γ^k r_{t+k} from step t on, compared with the steps of the same `state_ids`; 0 for a state seen once

    normalize: both comparisons are r − mean ("none"), or (r − mean)/(unbiased std + eps) ("std"). omega: ω. gamma: γ in
    [0, 1]. eps: see `normalize`. singleton: the score for a task with one run.
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
