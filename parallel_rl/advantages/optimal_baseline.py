"""Minimum-variance baselines for each place of an answer, of one turn or several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from parallel_rl.advantages.base import AdvantageEstimator, Advantages
from parallel_rl.advantages.table import SampleTable, gather_samples
from parallel_rl.agreement import sum_over_groups
from parallel_rl.config.strict import at_least
from parallel_rl.segments import running_sum, sum_groups

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class OptimalTokenBaseline(AdvantageEstimator, name="optimal_token_baseline"):
    """A_t = G_t − B_t, B_t the group's returns at t weighted by path variance (OTB, arXiv 2602.07078).

        B_t = Σ_i G_it·W_it / (Σ_i W_it + eps)        W_it = Σ_{s≤t} w_is        w_t = ρ_t²·(1 − 2π_t + Σ_v π_v²)

    The sums run over the group's answers with a valid token at place t, counted from the answer's first valid token. π_t is
    e^prev_logprobs; `sum_pi_squared` [N, S] is Σ_v π_v², see `token_scores`. A group of one has no baseline.

    handle_zero_tail: no baseline for the longest answer at places t ≥ n, n the second longest's number of valid tokens. Masked
        holes count in t, but not in n; tir_optimal_token_baseline counts them in neither.
    importance_cap: ρ_t = min(e^(prev − generation_logprobs), importance_cap); None: 1. eps: in the formula of B_t.
    """

    handle_zero_tail: bool = False
    importance_cap: float | None = None
    eps: float = 1e-8

    fields: ClassVar[tuple[str, ...]] = ("rewards", "group_ids", "prev_logprobs", "sum_pi_squared", "token_mask")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, eps=0)
        if self.importance_cap is not None and not self.importance_cap > 0:
            raise ValueError(f"importance_cap = {self.importance_cap} must be above 0, or None for no correction")

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, *(() if self.importance_cap is None else ("generation_logprobs",)))

    def tokens(
        self, batch: Mapping[str, Tensor], scores: Tensor, mask: Tensor, group: ProcessGroup | None
    ) -> Advantages:
        returns = super().tokens(batch, scores, mask, group).returns
        weight = 1 - 2 * batch["prev_logprobs"].exp() + batch["sum_pi_squared"]
        if self.importance_cap is not None:
            ratio = (batch["prev_logprobs"] - batch["generation_logprobs"]).exp().clamp(max=self.importance_cap)
            weight = weight * ratio.square()
        weight = running_sum(torch.where(mask, weight, 0.0))
        baselines = self._baselines(batch, returns, weight, mask, group)
        return Advantages(torch.where(mask, returns - baselines, 0.0), returns)

    def places(self, mask: Tensor) -> Tensor:
        """Return [N, S] the place in the answer of each valid token."""
        first = mask.to(torch.uint8).argmax(1, keepdim=True) if mask.shape[1] else mask.sum(1, keepdim=True)
        return torch.arange(mask.shape[1], device=mask.device) - first

    def counts(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Mark [M] bool the rows that count towards the size of their group."""
        return rows["keep"] > 0

    def _baselines(
        self, batch: Mapping[str, Tensor], returns: Tensor, weight: Tensor, mask: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        """Compute [N, S] baselines at valid tokens, from group sums over all data ranks."""
        place, widths = torch.where(mask, self.places(mask), 0), torch.full_like(batch["group_ids"], mask.shape[1])
        columns = {"group_ids": batch["group_ids"], "lengths": mask.sum(1), "keep": batch["sample_mask"].long()}
        rows, mine = gather_samples({**columns, "width": widths}, group)
        if not len(rows["keep"]):
            return torch.zeros_like(returns)
        rows["keep"], width = self.counts(rows).long(), int(rows["width"].max())
        names, index = rows["group_ids"].unique(return_inverse=True)
        cell = (index[mine, None] * width + place).flatten()
        terms = (torch.where(mask, x, 0.0).flatten() for x in (returns * weight, weight))
        sums = torch.stack([sum_groups(x, cell, len(names) * width) for x in terms]).to(returns.dtype)
        sums = sum_over_groups(sums, [group])
        baselines = (sums[0] / (sums[1] + self.eps))[cell].view_as(returns)
        size = torch.zeros_like(names).index_add(0, index, rows["keep"])[index]
        baselines = torch.where((size > 1)[mine, None], baselines, 0.0)
        if self.handle_zero_tail:
            lengths = torch.where(rows["keep"] > 0, rows["lengths"], -1).double()
            by_group = SampleTable(lengths, rows["group_ids"]).rows.nan_to_num(-1.0)
            longest, second = (
                torch.cat([by_group, torch.full_like(by_group[:, :1], -1)], 1).topk(2).values[index].unbind(1)
            )
            alone = (lengths == longest) & (longest > second) & (size > 1)
            baselines = torch.where(alone[mine, None] & (place >= second[mine, None]), 0.0, baselines)
        return baselines


@dataclass(frozen=True, kw_only=True)
class TIROptimalTokenBaseline(OptimalTokenBaseline, name="tir_optimal_token_baseline"):
    """`OptimalTokenBaseline` for multi-turn answers (TIR, arXiv 2602.07078): places skip masked holes.

    Place t is an answer's t-th sampled token. An answer without a valid token does not count in its group.
    """

    handle_zero_tail: bool = True

    def places(self, mask: Tensor) -> Tensor:
        return mask.cumsum(1) - 1

    def counts(self, rows: Mapping[str, Tensor]) -> Tensor:
        return (rows["keep"] > 0) & (rows["lengths"] > 0)
