"""The fused head refuses what does not fit, what it cannot do twice, and what its budget cannot hold."""

from __future__ import annotations

import pytest
import torch

from parallel_rl import linear_token_stats
from parallel_rl.validation import validation
from tests.vocab.linear.cases import D, N, V, make

SMALL = 4 * V * 8 * 3  # a few rows a chunk

HIDDEN, WEIGHT, TARGETS = torch.zeros(N, D), torch.zeros(V, D), torch.zeros(N, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(V, D + 1)}, f"calls for \\[V/tp, {D}\\]"),
        ({"weight": torch.zeros(V)}, "calls for"),
        ({"weight": torch.zeros(V, D).double()}, "must be the same"),
        ({"hidden": torch.zeros(N, D).long()}, "floating point"),
        ({"hidden": torch.zeros(D)}, "\\[..., D\\]"),
        ({"bias": torch.zeros(V + 1)}, "one per row of the weight"),
        ({"targets": TARGETS[1:]}, "targets must be int64 or int32"),
        ({"targets": TARGETS.float()}, "targets must be int64 or int32"),
        ({"targets": TARGETS + V}, "outside the vocabulary"),
        ({"softcap": 0.0}, "softcap = 0.0 must be positive"),
        ({"temperature": 0.0}, "must be positive"),
        ({"mode": "fast"}, "'fast' is not valid"),
        ({"mode": "in_forward"}, "needs an objective"),
        ({"budget": 0}, "positive number of bytes"),
        ({"budget": 100}, "too small for one row"),
        ({"rows": -1}, "rows = -1"),
        ({"rows": 3}, f"rows = 3 is too few: {N} rows"),
        ({"sequence_parallel": True}, "splits hidden over a tensor group"),
        ({"main_grad_factor": 1.0}, "needs weight.main_grad"),
        ({"vocab_start": 2}, "needs vocab_size"),
        ({"backend": "fast"}, "'fast' is not valid"),
    ],
)
def test_what_does_not_fit(change: dict, message: str) -> None:
    given = {"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS, **change}
    with pytest.raises(ValueError, match=message):
        linear_token_stats(**given)


def test_float16_and_in_forward() -> None:
    with pytest.raises(ValueError, match="float16"):
        linear_token_stats(
            HIDDEN.half(), WEIGHT.half(), TARGETS, mode="in_forward", objective=lambda stats: stats.logprobs.sum()
        )


@pytest.mark.parametrize("mode", ["in_forward", "auto"])
def test_an_objective_that_is_not_a_sum_over_tokens(mode: str) -> None:
    """Chunk after chunk it would be differentiated where the later rows are not known yet."""
    problem = make(ignored=False)
    hidden = problem.hidden.clone().requires_grad_()

    def loss(budget: int, validate: str) -> torch.Tensor:
        with validation(validate):  # type: ignore[arg-type]
            found = linear_token_stats(
                hidden, problem.weight, problem.targets, mode=mode, budget=budget,  # type: ignore[arg-type]
                objective=lambda stats: stats.logprobs.sum().square(),
            ).loss  # fmt: skip
        assert found is not None
        return found

    with pytest.raises(
        ValueError, match=r"the objective is not a sum over tokens: the gradient of row 0 was .* and became"
    ):
        loss(SMALL, "auto")
    loss(SMALL, "never")
    loss(1 << 26, "auto")  # one chunk knows all rows


def test_more_rows_than_the_bound_are_not_silent_where_values_are_not_looked_at() -> None:
    with validation("never"):
        stats = linear_token_stats(HIDDEN, WEIGHT, TARGETS, rows=3)
    assert bool(stats.logprobs.isnan().all())


@pytest.mark.parametrize("mode", ["in_forward", "resident"])
def test_a_second_backward_is_refused_where_the_first_used_something_up(mode: str) -> None:
    problem = make()
    hidden = problem.hidden.clone().requires_grad_()
    loss = linear_token_stats(
        hidden,
        problem.weight,
        problem.targets,
        mode=mode,
        objective=lambda stats: stats.logprobs.sum(),  # type: ignore[arg-type]
    ).loss
    assert loss is not None
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="mode='recompute' allows a second one"):
        loss.backward()


def test_recompute_allows_a_second_backward() -> None:
    problem = make()
    hidden = problem.hidden.clone().requires_grad_()
    total = linear_token_stats(hidden, problem.weight, problem.targets, mode="recompute").logprobs.sum()
    total.backward(retain_graph=True)
    assert hidden.grad is not None
    first = hidden.grad.clone()
    total.backward()
    assert torch.equal(hidden.grad, 2 * first)


@pytest.mark.parametrize("mode", ["in_forward", "resident", "recompute"])
def test_double_backward_is_refused(mode: str) -> None:
    problem = make()
    hidden = problem.hidden.clone().requires_grad_()
    loss = linear_token_stats(
        hidden,
        problem.weight,
        problem.targets,
        mode=mode,
        objective=lambda stats: stats.logprobs.sum(),  # type: ignore[arg-type]
    ).loss
    assert loss is not None
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_operands_changed_before_the_backward_are_noticed() -> None:
    problem = make()
    weight = problem.weight.clone().requires_grad_()
    total = linear_token_stats(problem.hidden, weight, problem.targets, mode="recompute").logprobs.sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
