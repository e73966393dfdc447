"""Estimators by group that weigh samples or groups, drop some, or sum several rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from parallel_rl.advantages.grouped import GRPO, GroupedEstimator
from parallel_rl.advantages.table import SampleTable
from parallel_rl.config.strict import at_least
from parallel_rl.vocab.sampling import sample_keys

if TYPE_CHECKING:
    from torch import Tensor

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class CPGD(GroupedEstimator, name="cpgd"):
    """CPGD's advantages (arXiv 2505.12504), by prompt.

    Attributes:
        normalize: "population": (r − mean)/(population std + eps); "clip_filter": (r − mean)·min(P/P', weight_clip) with P
            prompts, P' of them with unequal rewards; "none": r − mean.
        eps: added to the deviation. weight_clip: the largest weight of "clip_filter"; None: 3.
    """

    normalize: Literal["population", "clip_filter", "none"] = "population"
    eps: float = 1e-6
    weight_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, eps=0)
        if self.weight_clip is not None and not self.weight_clip >= 1:
            raise ValueError(f"weight_clip = {self.weight_clip} must be at least 1")
        if self.weight_clip is not None and self.normalize != "clip_filter":
            raise ValueError(
                f"weight_clip = {self.weight_clip} has no effect with normalize = {self.normalize!r}; leave it out"
            )

    def compare(self, table: SampleTable) -> Tensor:
        if self.normalize == "none":
            return table.centred
        if self.normalize == "population":
            return torch.where(table.constant, 0.0, table.centred / (table.deviation(0) + self.eps))
        return table.centred * table.informative_weight(3.0 if self.weight_clip is None else self.weight_clip)


@dataclass(frozen=True, kw_only=True)
class OPO(GroupedEstimator, name="opo"):
    """A_i = r_i − Σ_j n_j r_j / Σ_j n_j over the group, n_j valid tokens (OPO, arXiv 2505.23585)."""

    def compare(self, table: SampleTable) -> Tensor:
        lengths = table.columns["lengths"].double()
        weight = table.sums(lengths).clamp(min=1)
        # about the mean, so that equal rewards give exactly 0
        return table.centred - (table.sums(lengths * table.centred) / weight)[table.index]


@dataclass(frozen=True, kw_only=True)
class GPG(GroupedEstimator, name="gpg"):
    """A_i = α·(r_i − mean)/f (GPG, arXiv 2504.02546); α makes up for samples without gradient.

    scale: α: "informative": N / samples in groups with unequal rewards (the paper); "nonzero": N / nonzero rewards (verl);
        "none": 1. f_norm: f.
    """

    scale: Literal["informative", "nonzero", "none"] = "informative"
    f_norm: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.f_norm > 0:
            raise ValueError(f"f_norm = {self.f_norm} must be above 0")

    def compare(self, table: SampleTable) -> Tensor:
        if self.scale == "none":
            return table.centred / self.f_norm
        counted = ~table.constant if self.scale == "informative" else table.rewards != 0
        return table.centred / self.f_norm * (len(table.rewards) / counted.sum().clamp(min=1).double())


@dataclass(frozen=True, kw_only=True)
class PassAtK(GroupedEstimator, name="pass_at_k"):
    """A = r_max − r_second for the best sample of a group, 0 for the others (pass@k, arXiv 2503.19595).

    normalize: "std" divides by the group's unbiased deviation + eps. eps: see `normalize`.
    """

    normalize: Literal["std", "none"] = "none"
    eps: float = 1e-6

    def compare(self, table: SampleTable) -> Tensor:
        lead = table.rows.nan_to_num(-torch.inf).sort(1, descending=True).values[:, :2]
        lead = torch.where(table.size > 1, lead[:, 0] - lead[:, -1], 0.0)[table.index]
        if self.normalize == "std":
            lead = torch.where(table.constant, 0.0, lead / (table.deviation() + self.eps))
        return torch.where(table.rewards == table.top, lead, 0.0)


@dataclass(frozen=True, kw_only=True)
class REC(GroupedEstimator, name="rec"):
    """A_i = r_i − mean of the group's kept samples (REC, arXiv 2509.24203); a dropped sample gets 0.

    drop: "none", or "balance": drop samples below the mean until they are no more than the rest, at random by (seed,
        `sample_ids`).
    normalize: "population" divides by the kept samples' population deviation + eps; "none". eps: see `normalize`. seed: seed
        of the choice; change it each step.
    """

    drop: Literal["none", "balance"] = "none"
    normalize: Literal["population", "none"] = "none"
    eps: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, eps=0)
        if self.seed and self.drop == "none":
            raise ValueError(f"seed = {self.seed} has no effect with drop = 'none'; leave it out")

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, *(("sample_ids",) if self.drop == "balance" else ()))

    def compare(self, table: SampleTable) -> Tensor:
        keep = torch.ones_like(table.alone)
        if self.drop == "balance":
            below = table.centred < 0
            keys = sample_keys(self.seed, table.columns["sample_ids"], torch.zeros_like(table.index))
            order = table.spread(torch.where(below, keys, _LAST), _LAST).argsort(1).argsort(1)
            others = table.sums((~below).double())[table.index]
            keep = ~below | (order[table.index, table.place] < others)
        # every group keeps a sample: some are not below the mean
        kept = SampleTable(table.rewards[keep], table.group_ids[keep])
        scores = torch.zeros_like(table.rewards)
        scores[keep] = kept.centred
        if self.normalize == "population":
            scores[keep] = torch.where(kept.constant, 0.0, kept.centred / (kept.deviation(0) + self.eps))
        return scores


@dataclass(frozen=True, kw_only=True)
class GDPO(GroupedEstimator, name="gdpo"):
    """Compare each reward component separately, then their sum over the step (GDPO, arXiv 2601.05242).

        a_i = Σ_k w_k·GRPO_k(i)        A_i = (a_i − mean)/unbiased std over all samples; where that is 0: a_i − mean

    weights: w_k, one per column of `reward_components`; None: all 1. eps: that of GRPO_k, whose baseline and deviation
        are leave-one-out, as in NeMo-RL.
    """

    weights: tuple[float, ...] | None = None
    eps: float = 1e-6

    fields: ClassVar[tuple[str, ...]] = ("reward_components", "group_ids", "token_mask")

    def check_batch(self, batch: Mapping[str, Tensor]) -> None:
        count = batch["reward_components"].shape[1]
        if count < 2:
            raise ValueError(f"reward_components has {count} columns; gdpo needs at least 2 (grpo takes one reward)")
        if self.weights is not None and len(self.weights) != count:
            raise ValueError(
                f"weights = {list(self.weights)} must be one a column of reward_components, which has {count}"
            )

    def compare(self, table: SampleTable) -> Tensor:
        components = table.columns["reward_components"].double()
        weights = self.weights or (1.0,) * components.shape[1]
        grpo = GRPO(baseline="leave_one_out", normalize="leave_one_out", singleton=self.singleton, eps=self.eps)
        columns = zip(weights, components.unbind(1), strict=True)
        total = torch.stack([w * grpo.scores(table.with_rewards(column)) for w, column in columns]).sum(0)
        centred = torch.where((total == total[0]).all(), 0.0, total - total.mean())
        deviation = (centred.square().sum() / max(len(total) - 1, 1)).sqrt()
        return torch.where(deviation > 0, centred / deviation, centred)
