"""Sums over a whole optimizer step that a loss needs before its first gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.groups import ParallelGroups, group_size


class Statistics(Mapping[str, Tensor]):
    """Named scalar sums; `a + b` joins micro-batches, `reduce` joins ranks.

    A loss that needs them has `collect(<the same call>) -> Statistics`, run without gradient on every micro-batch of
    the step:

        statistics = (loss_fn.collect(*first) + loss_fn.collect(*second)).reduce(groups)
        loss, metrics = loss_fn(*first, statistics=statistics)
    """

    def __init__(self, sums: Mapping[str, Tensor]) -> None:
        self._sums = {name: value.detach().to(torch.float64) for name, value in sums.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def __add__(self, other: Statistics) -> Statistics:
        if set(self) != set(other):
            raise ValueError(f"statistics of different losses do not add up: {sorted(self)} and {sorted(other)}")
        return Statistics({name: value + other[name] for name, value in self.items()})

    def reduce(self, groups: ParallelGroups | None = None) -> Statistics:
        """Sums over context and data ranks: one all-reduce a group, one in all where `groups.data_context` is given."""
        groups = groups or ParallelGroups()
        names = sorted(self)
        sums = torch.stack([self[name] for name in names])
        for group in [groups.data_context] if groups.data_context is not None else [groups.context, groups.data]:
            if group_size(group) > 1:
                dist.all_reduce(sums, group=group)
        return Statistics(dict(zip(names, sums.unbind(), strict=True)))
