"""Dynamic context parallelism: micro-batches of one step on context groups of different sizes give one process's numbers."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from parallel_rl import SequencePackingLossWrapper, count_valid
from parallel_rl.groups import ParallelGroups, group_rank, group_size
from parallel_rl.testing.batches import carries_loss, poisoned
from parallel_rl.testing.cases import Case, Trial, has_scalar_head, reduced_numbers
from parallel_rl.testing.layouts import Layout, Piece, cut_rows
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.testing.step import local_positions
from tests.distributed import law_references

preload("parallel_rl", "tests.distributed.law_references")

# rounds of a step: the context groups of each, and the rows that they get; in the last one three ranks have nothing to do
ROUNDS = [
    [((0, 1, 2, 3), (0, 1, 2, 3))],
    [((0, 1), (4, 5)), ((2, 3), (6, 7))],
    [((0,), (8, 9)), ((1,), ()), ((2, 3), (10, 11))],
]
CASES = [
    Case("nll", {"aggregation": "seq-mean-token-mean"}),
    Case("clipped_pg", {"token_level_loss": False, "sequence_level_importance_ratios": True}),
    Case("policy", {"surrogate": {"name": "kl_cov", "fraction": 0.2}}),
    Case("policy", {"aggregation": "prompt-mean"}),
    Case("dpo"),
    Case("kto"),
    Case("value"),
]


class Share(NamedTuple):
    loss: float
    metrics: dict[str, float]
    squared_error: float


def _step(rank: int, trials: list[Trial], packing: str) -> list[Share]:
    """One step of each loss on this rank: it counts the micro-batches whose first rank it is; all is reduced over the world."""
    slots: list[tuple[dist.ProcessGroup | None, list[int]]] = []
    for each in ROUNDS:
        for ranks, rows in each:
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks and rows:
                slots.append((group, list(rows)))
    return [_one(trial, slots, packing) for trial in trials]


def _one(trial: Trial, slots: list[tuple[dist.ProcessGroup | None, list[int]]], packing: str) -> Share:
    case, batch, want, _ = trial
    domain = ParallelGroups(data=dist.group.WORLD)
    vocab = None if batch.logits.shape[-1] == 1 else batch.logits.shape[-1]
    loss_fn, columns = case.build(vocab_size=vocab), list(range(batch.logits.shape[-1]))
    data, carries = poisoned(batch.data, loss_fn), carries_loss(batch.data, loss_fn)
    calls, pieces, owned = [], [], []
    for group, rows in slots:
        layout = Layout(1, group_size(group), 1, packing, 1, "zigzag")
        piece = cut_rows(rows, batch.lengths, batch.width, layout, group_rank(group))
        leaf = local_positions(batch.logits, piece, columns, carries).requires_grad_()
        part = {name: field[rows] for name, field in data.items()}
        calls.append((leaf, part, group))
        pieces.append(piece)
        owned += [part] if group_rank(group) == 0 else []
    counts = count_valid(owned, dist.group.WORLD)
    losses = [_packed(loss_fn, piece) for piece in pieces]
    arguments = [
        ((leaf * 1.0).view(*piece.shape, -1), part, *counts, None, None, group)
        for (leaf, part, group), piece in zip(calls, pieces, strict=True)
    ]
    statistics = None
    if loss_fn.needs_statistics:
        statistics = loss_fn.count(owned, dist.group.WORLD)
        if loss_fn.needs_collect:
            parts = [fn.collect(*call) for fn, call in zip(losses, arguments, strict=True)]
            statistics |= reduce(add, parts).reduce(domain)
    share, metrics, wrong = 0.0, [], 0.0
    for fn, call, (leaf, *_), piece in zip(losses, arguments, calls, pieces, strict=True):
        loss, found = fn(*call, statistics=statistics)
        loss.backward()
        share += loss.item()
        metrics.append(found)
        truth = local_positions(want.gradient, piece, columns, carries, poison=False)
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        wrong += (gradient - truth).square().sum().item()
    return Share(share, reduced_numbers(metrics, domain), wrong)


def _packed(loss_fn, piece: Piece):
    true = piece.cu_seqlens
    return loss_fn if true is None else SequencePackingLossWrapper(loss_fn, true, piece.cu_seqlens_padded)


@pytest.mark.parametrize("packing", [pytest.param("padded", marks=pytest.mark.slow), "packed+padding"])
def test_context_groups_of_one_two_and_four_ranks_in_one_step(packing: str) -> None:
    """Token, sequence, pair, prompt and order statistics: a count or a factor of a fixed context size shows here alone."""
    trials = []
    for case in CASES:
        batch = law_references.batch_of(case)
        trials.append(Trial(case, batch, law_references.expected(case, batch)))
    ranks = run_world(4, _step, trials, packing)
    for index, trial in enumerate(trials):
        found, want, name = [shares[index] for shares in ranks], trial.want, trial.case.name
        assert sum(share.loss for share in found) == pytest.approx(want.loss, rel=1e-12), name
        error = sum(share.squared_error for share in found) ** 0.5 / want.gradient.norm().item()
        assert error < 1e-12, (name, error)
        for share in found:
            assert share.metrics == pytest.approx(want.metrics, rel=1e-10, abs=1e-12), name
    assert any(has_scalar_head(case.loss) for case in CASES)
