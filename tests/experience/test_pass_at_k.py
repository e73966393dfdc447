"""pass@k against its meaning: the share of all draws of k of the n completions in which one passes."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
import torch

from parallel_rl.training.algorithms.evaluation import evaluation_metrics, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_it_is_the_share_of_all_draws_and_the_closed_form(n: int) -> None:
    rows = torch.tensor([[place < count for place in range(n)] for count in range(n + 1)])
    for k in range(1, n + 1):
        found = pass_at_k(rows, k).tolist()
        draws = [[any(draw) for draw in combinations(row, k)] for row in rows.tolist()]
        assert found == pytest.approx([sum(each) / len(each) for each in draws], abs=1e-15)
        assert found == pytest.approx([1 - comb(n - c, k) / comb(n, k) for c in range(n + 1)], abs=1e-15)


def test_it_does_not_overflow() -> None:
    passed = torch.arange(1000).expand(2, 1000) < torch.tensor([[3], [990]])
    assert pass_at_k(passed, 500).tolist() == pytest.approx([1 - comb(997, 500) / comb(1000, 500), 1.0], rel=1e-12)


def test_metrics_of_all_prompts_and_of_each_source() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    assert evaluation_metrics(rewards, [None] * 3, 1.0) == pytest.approx(
        {"held_out_mean@4": 5.5 / 12, "held_out_pass@2": 0.5, "held_out_pass@4": 2 / 3}
    )
    found = evaluation_metrics(rewards, ["b", "a", "b"], 0.5)
    assert {name: value for name, value in found.items() if name.endswith("/b")} == pytest.approx(
        {"held_out_mean@4/b": 5.5 / 8, "held_out_pass@2/b": (1 - 1 / 6 + 1) / 2, "held_out_pass@4/b": 1.0}
    )
    assert found["held_out_pass@4/a"] == 0 and found["held_out_pass@4"] == pytest.approx(2 / 3)
    assert evaluation_metrics(rewards[:, :1], ["x"] * 3, 1.0) == {}


@pytest.mark.parametrize("k", [0, 3])
def test_more_draws_than_completions(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k = {k} must lie in \[1, 2\]"):
        pass_at_k(torch.ones(1, 2, dtype=torch.bool), k)
