"""Losses under test, and their reference numbers from one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parallel_rl.counts import count_valid
from parallel_rl.groups import ParallelGroups
from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.losses.registry import get_loss, registered_name
from parallel_rl.losses.value import ScalarHeadLoss
from parallel_rl.metrics import Metrics, reduce_metrics
from parallel_rl.statistics import Statistics

# (whole logits, data, config) -> the loss and its metrics
Reference = Callable[[Tensor, dict[str, Tensor], dict], tuple[Tensor, dict[str, float]]]


class Subject(Protocol):
    """A loss under test; each layout builds an instance with the call of `LossFn`."""

    @property
    def name(self) -> str:
        """Name the loss in reports."""

    @property
    def axes(self) -> frozenset[str]:
        """Return the axes of `EVERY_AXIS` that apply."""

    def build(
        self, *, vocab_size: int | None = None, cp_layout: CPLayout = "zigzag", consume_logits: bool = False
    ) -> LossFunction:
        """Build the loss for shards of a vocabulary of this size."""


EVERY_AXIS = frozenset(
    {"tensor", "context", "contiguous context", "data", "micro-batches", "packing", "prefix trees", "padded vocabulary"}
)


@dataclass(frozen=True)
class Case:
    """A loss by name or class, its config, and options of its constructor.

    >>> Case("clipped_pg", {"ratio_clip_min": 0.1}).name
    'clipped_pg-ratio_clip_min=0.1'
    """

    loss: str | type[LossFn]
    config: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = {**self.config, **self.options}
        name = self.loss if isinstance(self.loss, str) else registered_name(self.loss)
        return "-".join([name, *(f"{key}={_text(value)}" for key, value in options.items())])

    @property
    def axes(self) -> frozenset[str]:
        return EVERY_AXIS

    @property
    def loss_class(self) -> type[LossFn]:
        return get_loss(self.loss) if isinstance(self.loss, str) else self.loss

    def build(
        self, *, vocab_size: int | None = None, cp_layout: CPLayout = "zigzag", consume_logits: bool = False
    ) -> LossFn:
        make: Callable[..., LossFn] = self.loss_class
        layout: dict[str, object] = {"cp_layout": cp_layout}
        if not has_scalar_head(self.loss):
            layout |= {"vocab_size": vocab_size, "consume_logits": consume_logits}
        return make(self.config, **self.options, **layout)

    @property
    def truncated(self) -> bool:
        return not {"top_k", "top_p", "kept_sets"}.isdisjoint(self.options)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ".".join(f"{key}={_text(item)}" if key != "name" else str(item) for key, item in value.items())
    return ",".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)


class Batch(NamedTuple):
    """Whole global batch, see `batches`."""

    logits: Tensor  # [B, S, V], [B, S, 1] for a scalar head
    data: dict[str, Tensor]  # whole, token-aligned
    lengths: list[int]  # tokens of each row

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        return self.data["input_ids"].shape[1]


def has_scalar_head(loss: str | type[LossFn]) -> bool:
    """Return whether the loss reads one output per position instead of logits."""
    return issubclass(get_loss(loss) if isinstance(loss, str) else loss, ScalarHeadLoss)


class Expected(NamedTuple):
    """Loss, gradient of the logits and metrics of one process with the whole batch."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]


class Trial(NamedTuple):
    """A loss, its batch, and the reference result."""

    case: Subject
    batch: Batch
    want: Expected
    clean: bool = False  # no poison, for a loss that is known to fail on it


@contextmanager
def empty_rows_on_purpose() -> Iterator[None]:
    """Hide the warning about empty rows, which the batches of a check have on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="rows with sample_mask 1 have no valid token")
        yield


def alone(case: Subject, logits: Tensor, data: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
    """Call the loss on one process with the whole batch."""
    loss_fn, counts = case.build(), count_valid(data)
    call = (logits, data, *counts)
    return loss_fn(*call, statistics=step_statistics([(loss_fn, call)]))


def step_statistics(
    calls: Sequence[tuple[LossFunction, tuple]], groups: ParallelGroups | None = None
) -> Statistics | None:
    """Count the statistics of a step of these calls on this rank, if the loss needs any."""
    first, _ = calls[0]
    if not first.needs_statistics:
        return None
    statistics = first.count([data for _, (_, data, *_) in calls], None if groups is None else groups.data)
    if first.needs_collect:
        statistics |= reduce(add, [loss_fn.collect(*call) for loss_fn, call in calls]).reduce(groups)
    return statistics


def expected(case: Subject, batch: Batch, reference: Reference | None = None) -> Expected:
    """Return the results of the dense reference, or of the loss in one float64 process."""
    logits = batch.logits.clone().requires_grad_()
    if reference is not None:
        loss, metrics = reference(logits, batch.data, getattr(case, "config", {}))
    else:
        loss, parts = alone(case, logits, batch.data)
        metrics = reduced_numbers([parts])
    loss.backward()
    gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
    return Expected(loss.item(), gradient, metrics)


def reduced_numbers(metrics: Sequence[Metrics], groups: ParallelGroups | None = None) -> dict[str, float]:
    """Reduce the metrics of a step, if any."""
    return {name: value.item() for name, value in reduce_metrics(metrics, groups).items()} if metrics[0] else {}


def dense_error(trial: Trial, dtype: torch.dtype, reference: Reference | None = None) -> tuple[float, float]:
    """Return errors of plain PyTorch in low precision: float32 mathematics, gradient rounded to `dtype`."""
    case, batch, want, _ = trial
    logits = batch.logits.to(dtype).requires_grad_()
    data = {name: value.float() if value.dtype == torch.float64 else value for name, value in batch.data.items()}
    if reference is not None:
        loss, _ = reference(logits.float(), data, getattr(case, "config", {}))
    else:
        loss, _ = alone(case, logits.float(), data)
    loss.backward()
    assert logits.grad is not None
    gradient = (logits.grad.double() - want.gradient).norm() / want.gradient.norm()
    return abs(loss.item() - want.loss) / abs(want.loss), gradient.item()
