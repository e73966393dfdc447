"""Given the counts of the step, no split into micro-batches and no order of rows changes a loss."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_rl import ParallelGroups
from tests.compat.cases import responses
from tests.compat.law import run
from tests.compat.test_law_tokens import token_cases


@pytest.mark.parametrize("name", token_cases())
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_splits_and_orders(name: str, data: st.DataObject) -> None:
    case, whole = token_cases()[name], responses(data.draw(st.integers(0, 3)))
    # DPO's rows are pairs: chosen, rejected
    pairs = torch.tensor(data.draw(st.permutations(range(3))))
    order = torch.stack([2 * pairs, 2 * pairs + 1], 1).flatten()
    if "dpo" not in name:
        order = order[torch.tensor(data.draw(st.permutations(range(6))))]
    cuts = sorted(2 * cut for cut in data.draw(st.lists(st.integers(0, 3), max_size=3)))
    parts = [
        {key: x[order[start:end]] for key, x in whole.items()}
        for start, end in zip([0, *cuts], [*cuts, 6], strict=True)
    ]
    mask = whole["action_mask"]
    seqs = len(mask) if case.counts_empty_rows else mask.any(1).sum()
    counts = {"global_valid_seqs": seqs, "global_valid_toks": mask.sum()}
    loss, grads, _ = run(case, parts, counts, ParallelGroups(), {})
    leaves = {**whole, **{leaf: whole[leaf].clone().requires_grad_() for leaf in case.leaves}}
    expected, _ = case.call(leaves)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(expected, [leaves[leaf] for leaf in case.leaves])
    torch.testing.assert_close(functools.reduce(_join, grads)[0], grad[order], rtol=1e-12, atol=1e-12)


def _join(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(pair) for pair in zip(first, second, strict=True))
