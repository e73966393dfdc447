"""Statistics of a whole optimizer step, reduced before its first gradient: sums, and samples for order statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.groups import ParallelGroups, all_gather, group_size


class Statistics(Mapping[str, Tensor]):
    """Named scalar sums, and named samples [N]; `a + b` joins micro-batches, `reduce` joins ranks.

    A loss that needs them has `collect(<the same call>) -> Statistics`, run without gradient on every micro-batch of
    the step:

        statistics = (loss_fn.collect(*first) + loss_fn.collect(*second)).reduce(groups)
        loss, metrics = loss_fn(*first, statistics=statistics)

    >>> first, second = Statistics({"rows": torch.tensor(3)}), Statistics({"rows": torch.tensor(4)})
    >>> (first + second).reduce()["rows"].item()
    7.0

    Args:
        sums: 0-dim tensors, each this rank's own part. As a mapping, the statistics are these sums.
        samples: [n] tensors of one length, one entry a local token or sequence, for other statistics than sums (a quantile, the
            largest k). An entry that is masked or that another rank owns is NaN, in each of them; it sorts last.
    """

    def __init__(self, sums: Mapping[str, Tensor], samples: Mapping[str, Tensor] | None = None) -> None:
        self._sums = {name: value.detach().to(torch.float64) for name, value in sums.items()}
        self.samples = {name: value.detach().to(torch.float64) for name, value in (samples or {}).items()}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._sums:
            raise ValueError(
                f"statistics hold {sorted(self._sums)}, not {name!r}: they are of another loss or configuration"
            )
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def __add__(self, other: Statistics) -> Statistics:
        if set(self) != set(other) or set(self.samples) != set(other.samples):
            mine, theirs = ([*sorted(part), *sorted(part.samples)] for part in (self, other))
            raise ValueError(f"statistics of different losses do not add up: {mine} and {theirs}")
        return Statistics(
            {name: value + other[name] for name, value in self.items()},
            {name: torch.cat([value, other.samples[name]]) for name, value in self.samples.items()},
        )

    def reduce(self, groups: ParallelGroups | None = None) -> Statistics:
        """Sums, and samples of all, over context and data ranks.

        Costs one all-reduce a group (one in all where `groups.data_context` is given), and where there are samples two
        all-gathers: of their number, which the host waits for, and of the samples.
        """
        groups = groups or ParallelGroups()
        joint = [groups.data_context] if groups.data_context is not None else [groups.context, groups.data]
        names, kept = sorted(self), sorted(self.samples)
        sums = torch.stack([self[name] for name in names]) if names else torch.zeros(0)
        samples = torch.stack([self.samples[name] for name in kept], 1) if kept else None  # [n, K]
        for group in joint:
            if group_size(group) == 1:
                continue
            if names:
                dist.all_reduce(sums, group=group)
            if samples is not None:
                most = int(all_gather(torch.tensor([len(samples)], device=samples.device), group).max())
                padding = samples.new_full((most - len(samples), len(kept)), torch.nan)
                samples = all_gather(torch.cat([samples, padding]), group).flatten(0, 1)
        columns = [] if samples is None else samples.unbind(1)
        return Statistics(dict(zip(names, sums.unbind(), strict=True)), dict(zip(kept, columns, strict=True)))
