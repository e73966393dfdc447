"""Samples of a step by group, over all data ranks, with means and deviations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import communication_device
from parallel_rl.groups import all_gather, group_rank, group_size
from parallel_rl.segments import running_sum, sum_groups

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

RELATIVE_FLOOR = 1e-6  # deviations below this fraction of the largest reward are rounding and divide nothing


class SampleTable:
    """M samples with rewards, group ids and other columns, in float64.

    Args:
        rewards: [M]. group_ids: [M] integers, in any order.
        columns: [M] or [M, K] by name, such as `lengths`, the valid tokens of each sample.
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor, columns: Mapping[str, Tensor] | None = None) -> None:
        self.rewards, self.group_ids, self.columns = rewards.double(), group_ids, columns or {}
        self.names, self.index, self.size = group_ids.unique(return_inverse=True, return_counts=True)

    def with_rewards(self, rewards: Tensor) -> SampleTable:
        """Replace the rewards [M]; keep samples and groups."""
        return SampleTable(rewards, self.group_ids, self.columns)

    def sums(self, x: Tensor) -> Tensor:
        """Sum [M] over each group, to [G]."""
        return sum_groups(x, self.index, len(self.names))

    @cached_property
    def count(self) -> Tensor:
        """Return [M] the size of the sample's group."""
        return self.size[self.index].double()

    @cached_property
    def alone(self) -> Tensor:
        """Return [M] bool: the group has one sample."""
        return self.count == 1

    @cached_property
    def top(self) -> Tensor:
        """Return [M] the largest reward of the group."""
        return self._extreme("amax", -torch.inf)

    @cached_property
    def constant(self) -> Tensor:
        """Return [M] bool: all rewards of the group are equal to the bit."""
        return self._extreme("amin", torch.inf) == self.top

    @cached_property
    def centred(self) -> Tensor:
        """Return [M] r − mean of the group; exactly 0 in a constant group."""
        centred = self.rewards - (self.sums(self.rewards) / self.size)[self.index]
        return torch.where(self.constant, 0.0, centred)

    @cached_property
    def above_others(self) -> Tensor:
        """Return [M] r_i − mean_{j≠i} r_j = n/(n−1)·(r_i − mean); 0 for a group of one."""
        return self.centred * self.count / (self.count - 1).clamp(min=1)

    def deviation(self, correction: int = 1) -> Tensor:
        """Return [M] the group's standard deviation, Σ(r − mean)²/(n − correction), in two passes."""
        variance = self.sums(self.centred.square()) / (self.size - correction).clamp(min=1)
        return variance.sqrt()[self.index]

    def deviation_of_others(self) -> Tensor:
        """Return [M] the unbiased deviation of the group without the sample; 0 if it is rounding, or n ≤ 2."""
        median = self.rows.sort(1).values.gather(1, (self.size[:, None] - 1) // 2)  # NaN is last
        rows = torch.where(self.rows.isnan(), 0.0, self.rows - median)  # about the median: an outlier cancels no digits
        n = self.count
        mean = self._of_others(rows) / (n - 1).clamp(min=1)
        square = self._of_others(rows.square()) - (n - 1) * mean.square()
        deviation = (square.clamp(min=0) / (n - 2).clamp(min=1)).sqrt()
        floor = RELATIVE_FLOOR * self.rows.abs().nan_to_num(0.0).amax(1)[self.index]
        return torch.where((n > 2) & (deviation > floor), deviation, 0.0)

    def informative_weight(self, clip: float, flat: float = 1.0) -> Tensor:
        """Return [M] min(P/P', clip) in the P' of P groups with unequal rewards, else `flat`; 1 if P' = 0."""
        informative = torch.where(self.constant, 0.0, 1 / self.count).sum().round()
        weight = (len(self.names) / informative.clamp(min=1)).clamp(max=clip)
        return torch.where(informative > 0, torch.where(self.constant, flat, weight), 1.0)

    @cached_property
    def rows(self) -> Tensor:
        """Return [G, n_max] the rewards, one group a row, padded with NaN."""
        return self.spread(self.rewards, torch.nan)

    def spread(self, x: Tensor, behind: float) -> Tensor:
        """Spread [M] to [G, n_max], one group a row, padded with `behind`."""
        rows = x.new_full((len(self.names), int(self.size.max())), behind)
        rows[self.index, self.place] = x
        return rows

    @cached_property
    def place(self) -> Tensor:
        """Return [M] the sample's column in `rows`."""
        order = self.index.argsort(stable=True)
        first = self.size.cumsum(0) - self.size
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - first[self.index[order]]
        return place

    def _of_others(self, rows: Tensor) -> Tensor:
        first = torch.zeros_like(rows[:, :1])
        before = torch.cat([first, running_sum(rows)[:, :-1]], 1)
        after = torch.cat([running_sum(rows.flip(1)).flip(1)[:, 1:], first], 1)
        return (before + after)[self.index, self.place]

    def _extreme(self, reduce: str, start: float) -> Tensor:
        ends = self.rewards.new_full((len(self.names),), start)
        return ends.scatter_reduce(0, self.index, self.rewards, reduce)[self.index]


def gather_samples(columns: Mapping[str, Tensor], group: ProcessGroup | None) -> tuple[dict[str, Tensor], slice]:
    """Gather the rows of all ranks in rank order, in two all-gathers; ranks may hold no row.

    Args:
        columns: [n] or [n, k] each, integers or floats, the same names and k on every rank.
        group: the data ranks; None is one process.

    Returns:
        name → [M] or [M, k], int64 or float64, on the columns' device; the slice of this rank's rows.
    """
    home = next(iter(columns.values())).device
    wide = {name: x.double() if x.is_floating_point() else x.long() for name, x in columns.items()}
    count = len(next(iter(wide.values())))
    if group_size(group) == 1:
        return wide, slice(0, count)
    device = communication_device(group, home)
    bits = torch.cat([_columns(x).view(torch.int64) for x in wide.values()], 1).to(device)
    counts = all_gather(torch.tensor([count], device=device), group)[:, 0].tolist()
    padded = torch.cat([bits, bits.new_zeros(max(counts) - count, bits.shape[1])])
    parts = all_gather(padded, group) if max(counts) else padded[None].expand(len(counts), -1, -1)
    rows = torch.cat([part[:size] for part, size in zip(parts, counts, strict=True)]).to(home)
    gathered: dict[str, Tensor] = {}
    for name, x in wide.items():
        width = _columns(x).shape[1]
        part, rows = rows[:, :width].contiguous().view(x.dtype), rows[:, width:]
        gathered[name] = part if x.dim() == 2 else part[:, 0]
    start = sum(counts[: group_rank(group)])
    return gathered, slice(start, start + count)


def by_group(
    score: Callable[[SampleTable], Tensor], columns: Mapping[str, Tensor], keep: Tensor, group: ProcessGroup | None
) -> Tensor:
    """Score this rank's samples among the kept ones of all ranks, [N] float64; 0 for those not kept.

    Args:
        score: from a table of M samples to [M].
        columns: rewards [N] or reward_components [N, K] (summed without rewards), group_ids [N], and the columns of `score`.
        keep: [N] bool. group: the data ranks, which all call this.

    Raises:
        ValueError: on all ranks alike: no rank has a sample, or `score` raises.
    """
    rows, mine = gather_samples({**columns, "keep": keep.long()}, group)
    kept = rows.pop("keep") > 0
    if not len(kept):
        raise ValueError("there is no sample in the step; a comparison by group needs at least one")
    scores = torch.zeros(len(kept), dtype=torch.float64, device=kept.device)
    if kept.any():
        rows = {name: x[kept] for name, x in rows.items()}
        rewards = rows["rewards"] if "rewards" in rows else rows["reward_components"].sum(1)
        scores[kept] = score(SampleTable(rewards, rows["group_ids"], rows))
    return scores[mine]


def _columns(x: Tensor) -> Tensor:
    return (x[:, None] if x.dim() == 1 else x).contiguous()
