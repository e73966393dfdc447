"""Metrics that survive any split: each knows how its parts combine over ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from parallel_rl.agreement import communication_device
from parallel_rl.groups import ParallelGroups, group_size
from parallel_rl.schema import gather_named

if TYPE_CHECKING:
    from torch import Tensor


class Metric(NamedTuple):
    """One number and how its parts combine over context ranks, data ranks and micro-batches.

    Attributes:
        value: 0-dim; the numerator of a ratio, which a square-ratio squares last.
        per: the global count that divided the value: "tokens", "sequences", "pairs", "turns", ...; None: none.
    """

    kind: Literal["share", "count", "min", "max", "ratio", "square-ratio"]
    value: Tensor
    denominator: Tensor | None = None
    per: str | None = None


class Mean(NamedTuple):
    """Mean of an objective's value over the step's valid tokens (sequences, pairs).

    >>> Mean(torch.tensor([1.0, 3.0])).values
    tensor([1., 3.])
    """

    values: Tensor


class Sum(NamedTuple):
    """Sum of an objective's value over the step's valid tokens (sequences, pairs).

    >>> Sum(torch.tensor([1.0, 3.0])).values
    tensor([1., 3.])
    """

    values: Tensor


class MinMax(NamedTuple):
    """Extrema of an objective's value over the step's valid tokens, as `name_min` and `name_max`.

    >>> MinMax(torch.tensor([1.0, 3.0])).values
    tensor([1., 3.])
    """

    values: Tensor


Measure = Mean | Sum | MinMax


class Metrics(Mapping[str, "Tensor"]):
    """Metrics of a loss on this rank: name → device scalar; `reduce_metrics` combines them.

    >>> metrics = Metrics({"loss": Metric("share", torch.tensor(0.5)), "tokens": Metric("count", torch.tensor(3.0))})
    >>> metrics  # the numbers of this rank; printing waits for the device
    Metrics(loss: share 0.5, tokens: count 3)
    >>> float(metrics["loss"])
    0.5
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = {
            name: Metric(m.kind, _constant(m.value), None if m.denominator is None else _constant(m.denominator), m.per)
            for name, m in metrics.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        metric = self._metrics[name]
        return metric.value if metric.denominator is None else _ratio(metric.kind, metric.value, metric.denominator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}: {self._metrics[name].kind} {float(self[name]):.6g}' for name in self)})"

    @property
    def divided_by(self) -> dict[str, str | None]:
        """Map each metric to the step's count that divides its parts; None: none, or several.

        "tokens" is global_valid_toks, "sequences" global_valid_seqs, "pairs" half of it; others ("turns", "kept tokens", ...)
        are among the statistics.

        >>> Metrics({"loss": Metric("share", torch.tensor(0.5), per="tokens")}).divided_by
        {'loss': 'tokens'}
        """
        return {name: metric.per for name, metric in self._metrics.items()}

    def parts(self, name: str) -> Metric:
        """Return the kind and the raw parts of one metric."""
        return self._metrics[name]


def _constant(value: Tensor) -> Tensor:
    return value.detach() if value.requires_grad else value


def _ratio(kind: str, numerator: Tensor, denominator: Tensor) -> Tensor:
    numerator = numerator.square() if kind == "square-ratio" else numerator
    return torch.where(denominator == 0, 0.0, numerator / torch.where(denominator == 0, 1, denominator))


_DENOMINATOR = "denominator"
_NEUTRAL = {"min": torch.inf, "max": -torch.inf}  # of a rank without the metric; of sums it is 0


def reduce_metrics(metrics: Metrics | Sequence[Metrics], groups: ParallelGroups | None = None) -> dict[str, Tensor]:
    """Combine metrics to one process's numbers for the whole global batch: name → float64 scalar.

    >>> part = Metrics({"loss": Metric("share", torch.tensor(0.25)), "ratio_max": Metric("max", torch.tensor(1.5))})
    >>> {name: float(value) for name, value in reduce_metrics([part, part]).items()}
    {'loss': 0.5, 'ratio_max': 1.5}

    Shares and counts are summed, extrema stay extrema; ratios are divided (the numerator of a square-ratio squared) last. Every
    rank of the last pipeline stage calls it with its step's metrics. It costs one all-gather of the K parts and their names, or
    two with both context and data ranks and no `groups.data_context`; see `gather_named`.

    Args:
        metrics: those of one call, or a list of the micro-batches' with the same names. A rank without a micro-batch passes
            an empty list, and gets the same numbers as the others.
        groups: context and data groups; None is one process.

    Raises:
        ValueError: an empty list on every rank; micro-batches, or ranks where values are checked, with different names or
            kinds.
    """
    columns, row = _of_rank([metrics] if isinstance(metrics, Metrics) else metrics)
    groups = groups or ParallelGroups()
    for group in [groups.data_context] if groups.data_context is not None else [groups.context, groups.data]:
        if group_size(group) > 1:
            here = row if columns else row.to(communication_device(group, row.device))
            columns, rows, there = gather_named(columns, here, group)
            row = _combine(rows, columns, there)
    if not columns:
        raise ValueError(
            "reduce_metrics needs the metrics of at least one micro-batch, got an empty list on every rank"
        )
    values = dict(zip(columns, row.unbind(), strict=True))
    reduced = {}
    for column, value in values.items():
        kind, _, name = column.partition(" ")
        if kind != _DENOMINATOR:
            denominator = values.get(f"{_DENOMINATOR} {name}")
            reduced[name] = value if denominator is None else _ratio(kind, value, denominator)
    return reduced


def _of_rank(metrics: Sequence[Metrics]) -> tuple[list[str], Tensor]:
    """Return a rank's columns, "kind name" each, and their values [K]; empty without micro-batches."""
    if isinstance(metrics, Mapping) or not isinstance(metrics, Iterable):
        raise ValueError(
            f"reduce_metrics takes the Metrics of one call, or a list of them; got {type(metrics).__name__}"
        )
    entries = list(metrics)
    wrong = next((type(entry).__name__ for entry in entries if not isinstance(entry, Metrics)), None)
    if wrong is not None:
        raise ValueError(f"reduce_metrics takes the Metrics of one call, or a list of them; got a list with {wrong}")
    parts = [_columns(entry) for entry in entries]
    for part in parts:
        if list(part) != list(parts[0]):
            raise ValueError(f"every micro-batch must report the same metrics: {list(part)} against {list(parts[0])}")
    if not parts or not parts[0]:
        return [], torch.zeros(0, dtype=torch.float64)
    rows = torch.stack([torch.stack([value.to(torch.float64) for value in part.values()]) for part in parts])
    return list(parts[0]), _combine(rows, list(parts[0]))


def _columns(metrics: Metrics) -> dict[str, Tensor]:
    parts = {name: metrics.parts(name) for name in sorted(metrics)}
    columns = {f"{part.kind} {name}": part.value for name, part in parts.items()}
    denominators = {f"{_DENOMINATOR} {name}": part.denominator for name, part in parts.items()}
    return columns | {name: value for name, value in denominators.items() if value is not None}


def _combine(rows: Tensor, columns: Sequence[str], there: Tensor | None = None) -> Tensor:
    """[n, K] to [K], of the rows that are `there`."""
    combined = []
    for x, column in zip(rows.unbind(1), columns, strict=True):
        kind = column.partition(" ")[0]
        if kind in _NEUTRAL:
            x = x if there is None else torch.where(there, x, _NEUTRAL[kind])
            combined.append(x.amin(0) if kind == "min" else x.amax(0))
        else:
            combined.append(x.sum(0))
    return torch.stack(combined) if combined else rows.new_zeros(0)
