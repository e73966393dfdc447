"""What the tests of the law share: a loss and its keywords, and a rank's part of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl import Metrics, ParallelGroups, reduce_metrics
from parallel_rl.metrics import Metric
from parallel_rl.statistics import Statistics

Data = dict[str, Tensor]
Answer = tuple[Tensor, Mapping[str, "float | Tensor"]]


class Case(NamedTuple):
    """A loss from a batch and the keywords of a step, the leaves that get gradients, and its `collect`, if it has one."""

    call: Callable[..., Answer]
    leaves: tuple[str, ...] = ("logprob",)
    collect: Callable[..., Statistics] | None = None
    counts_empty_rows: bool = True


def plain(fn: Callable, *names: str) -> Callable[..., Answer]:
    """A class that returns a scalar, or a scalar and means, as (loss, metrics)."""

    def call(data: Data, **keywords: object) -> Answer:
        found = fn(*(data[name] for name in names), **keywords)
        if isinstance(found, Tensor):
            return found, {}
        means = {f"mean{i}": x for i, x in enumerate(found[1:]) if x is not None and x.dim() == 0}
        return found[0], Metrics({key: Metric("share", x) for key, x in means.items()}) if keywords else means

    return call


def run(case: Case, parts: list[Data], counts: dict, groups: ParallelGroups, context: dict) -> tuple:
    """This rank's sum of shares, gradients of each part, and the reduced metrics."""
    statistics = {}
    if case.collect is not None:
        every = [case.collect(part, **context) for part in parts]
        statistics = {"statistics": functools.reduce(lambda a, b: a + b, every).reduce(groups)}
    losses, grads, metrics = [], [], []
    for part in parts:
        part = {**part, **{leaf: part[leaf].clone().requires_grad_() for leaf in case.leaves}}
        loss, found = case.call(part, **counts, **context, **statistics)
        grads.append(torch.autograd.grad(loss, [part[leaf] for leaf in case.leaves]))
        losses.append(loss.detach())
        metrics.append(found)
    return sum(losses), grads, reduce_metrics(metrics, groups) if metrics[0] else {}


def floats(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Metrics on the host."""
    return {name: float(value) for name, value in metrics.items()}
