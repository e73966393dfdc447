"""A rank without a row takes part in the step like any other: it adds nothing, and its gradient exists."""

from __future__ import annotations

import pytest
import torch

from parallel_rl import count_valid, get_loss, reduce_metrics
from parallel_rl.testing.batches import make_batch
from parallel_rl.testing.cases import Case, alone, step_statistics
from tests.distributed.law import CORE


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
