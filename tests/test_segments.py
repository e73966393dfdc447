"""Sums over groups have the same bits on every device: no float is added in any order."""

from __future__ import annotations

import pytest
import torch

from parallel_rl.advantages import estimate
from parallel_rl.advantages.table import SampleTable
from parallel_rl.segments import Groups, running_sum, sum_groups, sum_sorted
from tests.advantages.test_world import CASES, whole
from tests.watch import AnyOrder


def test_sums_of_groups_are_those_of_one_place_after_the_other() -> None:
    g = torch.Generator().manual_seed(0)
    for size, number in ((1, 1), (40, 7), (400, 300)):
        x = torch.randn(size, generator=g, dtype=torch.float64)
        index = torch.randint(number, (size,), generator=g)
        with AnyOrder() as order:
            found = sum_groups(x, index, number)
        assert torch.equal(found, torch.zeros(number, dtype=torch.float64).index_add(0, index, x)) and not order.seen


@pytest.mark.parametrize("shape", [(40,), (40, 3), (40, 2, 5)])
def test_a_host_sums_gradients_of_shared_values_as_a_card_does(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    groups = Groups.of(torch.randint(12, shape[:1], generator=g), 14)
    values = torch.zeros(14, *shape[1:], dtype=torch.float64 if len(shape) == 1 else torch.float32, requires_grad=True)
    grad = torch.randn(shape, generator=g, dtype=values.dtype)
    [summed] = torch.autograd.grad(groups.take(values), values, grad)
    assert torch.equal(summed, sum_sorted(grad, groups.order, groups.offsets)) and summed.abs().sum() > 0


def test_tensor_ranks_score_alike() -> None:
    """Those of a card differed in the last bit of an advantage, and then in what each learns."""
    with AnyOrder() as order:
        table = SampleTable(torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([4, 7, 4, 7]))
        assert table.centred.tolist() == [0.25, -1.0, -0.25, 1.0] and table.deviation().shape == (4,)
        for case in CASES:
            estimate(case, whole())
    assert order.seen == []
    with AnyOrder() as order:
        torch.zeros(2).index_add(0, torch.tensor([0, 1]), torch.ones(2))
        torch.zeros(2).cumsum(0)
        torch.arange(2).cumsum(0)
        torch.zeros(2).median(0)
    assert order.seen == ["index_add", "cumsum", "median"]


def test_running_sums_are_added_in_one_order() -> None:
    g = torch.Generator().manual_seed(0)
    for size in (0, 1, 2, 7, 64, 1000):
        x = torch.randn(3, size, generator=g, dtype=torch.float64)
        torch.testing.assert_close(running_sum(x), x.cumsum(1))
