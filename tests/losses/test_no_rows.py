"""A rank without a row takes part in the step like any other: it adds nothing, and its gradient exists."""

from __future__ import annotations

import pytest
import torch

from parallel_rl import LMHeadInput, count_valid, get_loss, reduce_metrics
from parallel_rl.testing.batches import make_batch
from parallel_rl.testing.cases import Case, alone, step_statistics
from parallel_rl.testing.hidden_states import head_of, takes_head
from parallel_rl.vocab.linear.plan import LinearMode
from tests.distributed.law import CORE


@pytest.mark.parametrize("case", CORE, ids=lambda case: case.name)
def test_counts_of_one_element(case: Case) -> None:
    """Counts of shape [1], are the same numbers; reduce_metrics died of their shape."""
    batch = make_batch(3, False, case.loss, torch.float64)
    loss_fn, counts = get_loss(case.loss)(case.config), count_valid(batch.data)
    found = []
    for given in (counts, [count[None] for count in counts]):
        statistics = None
        if loss_fn.needs_statistics:
            statistics = loss_fn.count(batch.data)
            if loss_fn.needs_collect:
                statistics |= loss_fn.collect(batch.logits, batch.data, *given).reduce()
        loss, metrics = loss_fn(batch.logits, batch.data, *given, statistics=statistics)
        found.append((loss, reduce_metrics([metrics])))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("all_empty", [False, True])
@pytest.mark.parametrize("case", CORE, ids=lambda case: case.name)
def test_a_batch_without_rows(case: Case, all_empty: bool) -> None:
    batch = make_batch(3, False, case.loss, torch.float64)
    logits, data = batch.logits, batch.data
    none = {name: value[:0] for name, value in data.items()}
    loss_fn, counts = get_loss(case.loss)(case.config), count_valid(none if all_empty else data)
    empty = logits[:0].clone().requires_grad_()
    calls = [(loss_fn, (empty, none, *counts)), (loss_fn, (logits, data, *counts))]
    statistics = step_statistics(calls[:1] if all_empty else calls)
    loss, metrics = loss_fn(empty * 1.0, none, *counts, statistics=statistics)
    loss.backward()
    assert loss.item() == 0
    assert empty.grad is not None and empty.grad.shape == empty.shape
    if not all_empty:
        whole, parts = loss_fn(logits, data, *counts, statistics=statistics)
        expected, expected_parts = alone(case, logits, data)
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=0)
        both, one = reduce_metrics([parts, metrics]), reduce_metrics([expected_parts])
        for name, value in one.items():
            torch.testing.assert_close(both[name], value, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("mode", ["auto", "recompute"])
@pytest.mark.parametrize("case", [case for case in CORE if takes_head(case)], ids=lambda case: case.name)
def test_hidden_states_without_rows(case: Case, mode: LinearMode) -> None:
    """The same from hidden states: the backward of losses on rows of logits took the shape of its scale from a row."""
    batch = make_batch(3, False, case.loss, torch.float64)
    whole, weight = head_of(batch)
    hidden, weight = whole[:0].clone().requires_grad_(), weight.requires_grad_()
    none = {name: value[:0] for name, value in batch.data.items()}
    loss_fn, counts = get_loss(case.loss)(case.config), count_valid(batch.data)
    head = LMHeadInput(hidden * 1.0, weight, mode="auto" if loss_fn.requirements.reads == "logits" else mode)
    call = (head, none, *counts)
    loss, _ = loss_fn(*call, statistics=step_statistics([(loss_fn, call)]))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape
    assert weight.grad is not None and not weight.grad.any()
