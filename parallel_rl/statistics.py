"""Statistics of a whole optimizer step, reduced before its first gradient: sums, samples and records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.agreement import communication_device
from parallel_rl.groups import ParallelGroups, all_gather, group_size
from parallel_rl.schema import gather_named


class Statistics(Mapping[str, Tensor]):
    """Named scalar sums, samples [N] and records [R] of a step, for a call's `statistics=`.

    A loss that needs statistics gets them in two ways. `count(micro_batches, data_group)` reads the data alone.
    `collect(<the same call>)` reads the model's output, without gradient, on every micro-batch. `a + b` joins micro-batches,
    `reduce` joins ranks, `a | b` joins counted and collected statistics:

        statistics = loss_fn.count([first_data, second_data], data_group)
        if loss_fn.needs_collect:
            statistics |= (loss_fn.collect(*first) + loss_fn.collect(*second)).reduce(groups)
        loss, metrics = loss_fn(*first, statistics=statistics)

    >>> first, second = Statistics({"rows": torch.tensor(3)}), Statistics({"rows": torch.tensor(4)})
    >>> (first + second).reduce()["rows"].item()
    7.0

    Args:
        sums: 0-dim tensors, each this rank's own part. As a mapping, the statistics are these sums.
        samples: [n] tensors of one length, one entry a token or sequence, for order statistics (a quantile, the top k).
            An entry that is masked or owned by another rank is NaN in each of them; it sorts last.
        records: [r] integer tensors of one length, an entry per row (an id, its number of tokens), of data that context ranks
            share: gathered over data ranks only, in rank order.
    """

    def __init__(
        self,
        sums: Mapping[str, Tensor],
        samples: Mapping[str, Tensor] | None = None,
        records: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._sums = {name: value.detach().to(torch.float64) for name, value in sums.items()}
        self.samples = {name: value.detach().to(torch.float64) for name, value in (samples or {}).items()}
        self.records = {name: value.detach().to(torch.int64) for name, value in (records or {}).items()}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._sums:
            raise ValueError(
                f"statistics hold {sorted(self._sums)}, not {name!r}: they are of another loss or configuration; pass what "
                "this loss's `count` or `collect` returned"
            )
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def __add__(self, other: Statistics) -> Statistics:
        if self._names() != other._names():
            mine, theirs = ([name for part in names for name in part] for names in (self._names(), other._names()))
            raise ValueError(f"statistics of different losses do not add up: {mine} and {theirs}")
        return Statistics(
            {name: value + other[name] for name, value in self.items()},
            {name: torch.cat([value, other.samples[name]]) for name, value in self.samples.items()},
            {name: torch.cat([value, other.records[name]]) for name, value in self.records.items()},
        )

    def __or__(self, other: Statistics) -> Statistics:
        twice = [
            name for mine, theirs in zip(self._names(), other._names(), strict=True) for name in mine if name in theirs
        ]
        if twice:
            raise ValueError(f"{twice} stand in both statistics; join micro-batches with +, count and collect with |")
        return Statistics(
            {**self._sums, **other._sums}, {**self.samples, **other.samples}, {**self.records, **other.records}
        )

    def _names(self) -> tuple[list[str], list[str], list[str]]:
        return sorted(self), sorted(self.samples), sorted(self.records)

    def prefixed(self, prefix: str) -> Statistics:
        """Return a copy with `prefix` before each name."""
        return self._renamed(lambda name: prefix + name)

    def under(self, prefix: str) -> Statistics:
        """Return the statistics whose names begin with a prefix, without it; inverts `prefixed`."""
        return self._renamed(lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None)

    def _renamed(self, rename: Callable[[str], str | None]) -> Statistics:
        parts = self._sums, self.samples, self.records
        return Statistics(
            *({new: x for name, x in part.items() if (new := rename(name)) is not None} for part in parts)
        )

    def to(self, device: torch.device) -> Statistics:
        """Copy to `device`; the host does not wait."""
        parts = self._sums, self.samples, self.records
        sums, samples, records = (
            {name: value.to(device, non_blocking=True) for name, value in part.items()} for part in parts
        )
        return Statistics(sums, samples, records)

    def reduce(self, groups: ParallelGroups | None = None) -> Statistics:
        """Sums, and samples of all, over context and data ranks; records of all, over data ranks.

        A rank without a micro-batch calls it on `Statistics({})`, with the same result. It costs an all-gather of names and an
        all-reduce a group (one with `groups.data_context`). Samples and records cost two all-gathers each: of their number,
        for which the host waits, and of their values.

        Raises:
            ValueError: ranks with statistics of different losses, where values are checked.
        """
        groups = groups or ParallelGroups()
        joint = [groups.data_context] if groups.data_context is not None else [groups.context, groups.data]
        joint = [group for group in joint if group_size(group) > 1]
        mine = self
        for group in joint:
            mine = mine._as_named_by(group)
        names, kept, listed = mine._names()
        sums = torch.stack([mine[name] for name in names]) if names else torch.zeros(0)
        samples, records = _columns(mine.samples, kept), _columns(mine.records, listed)
        for group in joint:
            if names:
                dist.all_reduce(sums, group=group)
            samples = _gather_rows(samples, group)
        records = _gather_rows(records, groups.data)
        return Statistics(
            dict(zip(names, sums.unbind(), strict=True)),
            dict(zip(kept, samples.unbind(1), strict=True)),
            dict(zip(listed, records.unbind(1), strict=True)),
        )

    def _as_named_by(self, group: dist.ProcessGroup | None) -> Statistics:
        """Return the statistics; on a rank without any, zeros and no rows under the group's names."""
        parts = {"sum": self._sums, "samples": self.samples, "records": self.records}
        names = [f"{kind} {name}" for kind, part in parts.items() for name in sorted(part)]
        like = next((value for part in parts.values() for value in part.values()), torch.zeros(0))
        device = like.device if names else communication_device(group, like.device)
        keys = gather_named(names, torch.zeros(len(names), dtype=torch.float64, device=device), group).names
        if names:
            return self
        nothing = {"sum": torch.zeros((), device=device)}
        return Statistics(*(
            {name.partition(" ")[2]: nothing.get(kind, torch.zeros(0, device=device)) for name in keys if name.startswith(kind)}
            for kind in parts
        ))  # fmt: skip


def _columns(values: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.stack([values[name] for name in names], 1) if names else torch.zeros(0, 0)


def _gather_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group_size(group) == 1 or not x.shape[1]:
        return x
    rows = all_gather(torch.tensor([len(x)], device=x.device), group).flatten().tolist()
    padded = torch.cat([x, x.new_zeros(max(rows) - len(x), x.shape[1])])
    return torch.cat([part[:count] for part, count in zip(all_gather(padded, group), rows, strict=True)])
