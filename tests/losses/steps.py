"""One optimizer step of a loss in one process, in any split into micro-batches, and batches with given log-probs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl import count_valid, reduce_metrics
from parallel_rl.losses.core.base import LossFn
from parallel_rl.testing.cases import step_statistics


class Step(NamedTuple):
    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def step(
    loss_fn: LossFn, logits: Tensor, data: dict[str, Tensor], micro_batches: Sequence[Sequence[int]] | None = None
) -> Step:
    """Rows in the given micro-batches (in any order), all of them in one by default; the gradient in the logits' order."""
    leaf = logits.detach().clone().requires_grad_()
    parts = [list(range(len(logits)))] if micro_batches is None else [list(rows) for rows in micro_batches]
    counts = count_valid(data)
    calls = [(leaf[rows], {name: value[rows] for name, value in data.items()}, *counts) for rows in parts]
    statistics = step_statistics([(loss_fn, call) for call in calls])
    results = [loss_fn(*call, statistics=statistics) for call in calls]
    total = sum(loss for loss, _ in results)
    total.backward()
    assert leaf.grad is not None
    reduced = reduce_metrics([metrics for _, metrics in results])
    return Step(total.item(), leaf.grad, {name: value.item() for name, value in reduced.items()})


def cut(order: Sequence[int], cuts: Iterable[int], pairs: bool = False) -> list[list[int]]:
    """Micro-batches of the rows (or of the pairs' rows) in this order, cut at these places."""
    parts = [order[a:b] for a, b in pairwise([0, *sorted(cuts), len(order)])]
    return [[2 * pair + side for pair in part for side in (0, 1)] if pairs else list(part) for part in parts]


def one_token_rows(
    policy: Sequence[float], reference: Sequence[float] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Responses of one token with just these log-probs: two words, word 0 the target, in float64."""
    wanted = torch.tensor(policy, dtype=torch.float64)
    rows = len(wanted)
    logits = torch.zeros(rows, 2, 2, dtype=torch.float64)
    logits[:, 0] = torch.stack([wanted, torch.log1p(-wanted.exp())], -1)
    data = {
        "input_ids": torch.zeros(rows, 2, dtype=torch.int64),
        "token_mask": torch.ones(rows, 2),
        "sample_mask": torch.ones(rows),
    }
    if reference is not None:
        data["reference_policy_logprobs"] = torch.tensor([[7.0, value] for value in reference], dtype=torch.float64)
    return logits, data


def coefficients(gradient: Tensor, policy: Sequence[float]) -> list[float]:
    """dL/d log-prob of each row of `one_token_rows`, from dL/dz_0 = dL/dl·(1 − p)."""
    p = torch.tensor(policy, dtype=torch.float64).exp()
    return (gradient[:, 0, 0] / (1 - p)).tolist()
