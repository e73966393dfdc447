"""Metrics that survive any split: each knows how its parts combine over ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from parallel_rl.groups import ParallelGroups, all_gather, group_size

if TYPE_CHECKING:
    from torch import Tensor


class Metric(NamedTuple):
    """One number and how its parts combine over context ranks, data ranks and micro-batches."""

    kind: Literal["share", "count", "min", "max", "ratio"]
    value: Tensor  # 0-dim; the numerator of a ratio
    denominator: Tensor | None = None


class Mean(NamedTuple):
    """A metric of an objective: the mean over the step's valid tokens (sequences, pairs) of one value for each.

    >>> Mean(torch.tensor([1.0, 3.0])).values
    tensor([1., 3.])
    """

    values: Tensor


class Sum(NamedTuple):
    """A metric of an objective: the sum over the step's valid tokens (sequences, pairs) of one value for each.

    >>> Sum(torch.tensor([1.0, 3.0])).values
    tensor([1., 3.])
    """

    values: Tensor


class MinMax(NamedTuple):
    """Two metrics of an objective, `name_min` and `name_max`: the extrema over the step's valid tokens (sequences, pairs).

    >>> MinMax(torch.tensor([1.0, 3.0])).values
    tensor([1., 3.])
    """

    values: Tensor


Measure = Mean | Sum | MinMax


class Metrics(Mapping[str, "Tensor"]):
    """A loss's metrics on this rank: name → device scalar. Reading one never communicates; `reduce_metrics` combines them.

    >>> metrics = Metrics({"loss": Metric("share", torch.tensor(0.5)), "tokens": Metric("count", torch.tensor(3.0))})
    >>> metrics  # the numbers of this rank; printing waits for the device
    Metrics(loss: share 0.5, tokens: count 3)
    >>> float(metrics["loss"])
    0.5
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = {
            name: Metric(m.kind, _constant(m.value), None if m.denominator is None else _constant(m.denominator))
            for name, m in metrics.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        metric = self._metrics[name]
        return metric.value if metric.denominator is None else _ratio(metric.value, metric.denominator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}: {self._metrics[name].kind} {float(self[name]):.6g}' for name in self)})"

    def parts(self, name: str) -> Metric:
        """Return the kind and the raw parts of one metric."""
        return self._metrics[name]


def _constant(value: Tensor) -> Tensor:
    return value.detach() if value.requires_grad else value


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator == 0, 0.0, numerator / torch.where(denominator == 0, 1, denominator))


_COMBINE = {
    "share": lambda x: x.sum(0),
    "count": lambda x: x.sum(0),
    "ratio": lambda x: x.sum(0),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
}


def reduce_metrics(metrics: Sequence[Metrics], groups: ParallelGroups | None = None) -> dict[str, Tensor]:
    """Combine metrics to the numbers that one process with the whole global batch would log.

    >>> part = Metrics({"loss": Metric("share", torch.tensor(0.25)), "ratio_max": Metric("max", torch.tensor(1.5))})
    >>> {name: float(value) for name, value in reduce_metrics([part, part]).items()}
    {'loss': 0.5, 'ratio_max': 1.5}

    Shares and counts are summed, extrema stay extrema, a ratio is divided last. Every rank of the last pipeline stage
    calls it with the metrics of its micro-batches of one step; it costs one all-gather of the K parts (two, where
    `groups` has no `data_context` group and both context and data parallelism are on).

    Args:
        metrics: one entry a micro-batch, all with the same names.
        groups: context and data groups; None is one process.

    Returns:
        name → float64 scalar on the metrics' device.

    Raises:
        ValueError: an empty list, or micro-batches with different names or kinds.
    """
    if not metrics:
        raise ValueError("reduce_metrics needs the metrics of at least one micro-batch, got an empty list")
    parts = [[entry.parts(name) for name in sorted(entry)] for entry in metrics]
    names = sorted(metrics[0])
    kinds = [part.kind for part in parts[0]]
    for entry, row in zip(metrics, parts, strict=True):
        if sorted(entry) != names or [part.kind for part in row] != kinds:
            raise ValueError(f"every micro-batch must report the same metrics: {sorted(entry)} against {names}")
    columns = kinds + [kind for kind in kinds if kind == "ratio"]
    rows = torch.stack([torch.stack(_flat(row)) for row in parts])
    groups = groups or ParallelGroups()
    rows = _combine(rows, columns)
    for group in [groups.data_context] if groups.data_context is not None else [groups.context, groups.data]:
        if group_size(group) > 1:
            rows = _combine(all_gather(rows, group)[:, 0], columns)
    values = iter(rows[0].unbind())
    reduced = {name: next(values) for name in names}
    for name, kind in zip(names, kinds, strict=True):
        if kind == "ratio":
            reduced[name] = _ratio(reduced[name], next(values))
    return reduced


def _flat(row: list[Metric]) -> list[Tensor]:
    denominators = [part.denominator for part in row if part.denominator is not None]
    return [value.to(torch.float64) for value in [part.value for part in row] + denominators]


def _combine(rows: Tensor, kinds: Sequence[str]) -> Tensor:
    return torch.stack([_COMBINE[kind](rows[:, k]) for k, kind in enumerate(kinds)])[None]
