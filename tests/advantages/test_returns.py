"""Returns and GAE against the plain recursion, one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl.advantages import discounted_returns, gae, length_adaptive_lambda, terminal_rewards
from parallel_rl.advantages.returns import reverse_scan
from tests.watch import Watch

# Section 16 of the specification.
REWARDS = torch.tensor([[0, 0, 1, 0], [0, 0, 0, -0.5], [0, 2, 0, 0]], dtype=torch.float64)
VALUES = torch.tensor([[0.1, 0.2, 0.3, 0], [0.5, 0.4, 0.3, 0.2], [-0.1, 0, 0, 0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])


def loop(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lams: list[float], ends: list[float]
) -> tuple[Tensor, Tensor]:
    """The recursion over the valid tokens of each row, from the last to the first."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for i in range(len(rewards)):
        following, advantage = ends[i], 0.0
        for t in reversed([t for t in range(mask.shape[1]) if mask[i, t]]):
            value = float(values[i, t])
            advantage = float(rewards[i, t]) + gamma * following - value + gamma * lams[i] * advantage
            advantages[i, t], returns[i, t], following = advantage, advantage + value, value
    return advantages, returns


def test_golden_rows() -> None:
    found = gae(REWARDS, VALUES, MASK, 0.99, 0.95)
    assert found.advantages[:, 0].tolist() == pytest.approx([0.808407, -0.873432, 1.981], abs=5e-7)
    expected = loop(REWARDS, VALUES, MASK, 0.99, [0.95] * 3, [0.0] * 3)
    torch.testing.assert_close(found.advantages, expected[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(found.returns, expected[1], rtol=0, atol=1e-14)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 33)),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
)
def test_any_holes_against_the_recursion(seed: int, shape: tuple[int, int], gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(shape, generator=generator) < 0.6
    ends = torch.randn(shape[0], generator=generator, dtype=torch.float64)
    lams = torch.rand(shape[0], generator=generator, dtype=torch.float64)
    poisoned = [torch.where(mask, x, torch.nan) for x in (rewards, values)]

    found = gae(*poisoned, mask, gamma, lam)
    for mine, true in zip(found, loop(rewards, values, mask, gamma, [lam] * shape[0], [0.0] * shape[0]), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)
    found = gae(*poisoned, mask, gamma, lams, lam, ends)
    own = loop(rewards, values, mask, gamma, lams.tolist(), ends.tolist())[0]
    targets = loop(rewards, values, mask, gamma, [lam] * shape[0], ends.tolist())[1]
    torch.testing.assert_close(found.advantages, own, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.returns, targets, rtol=1e-12, atol=1e-12)
    # with V = 0 and λ = 1 the advantage is the return
    returns = discounted_returns(poisoned[0], mask, gamma)
    plain = loop(rewards, torch.zeros_like(values), mask, gamma, [1.0] * shape[0], [0.0] * shape[0])[0]
    torch.testing.assert_close(returns, plain, rtol=1e-12, atol=1e-12)


def test_a_long_row_neither_overflows_nor_drifts() -> None:
    x = torch.ones(2, 4097, dtype=torch.float64)
    summed = reverse_scan(x, torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert summed[0].tolist() == list(range(4097, 0, -1))
    assert summed[1, 0] == 2.0 and summed[1, -2:].tolist() == [1.5, 1.0]


def test_returns_are_carried_over_an_observation() -> None:  # Q47 of the specification
    rewards = terminal_rewards(torch.tensor([1.0]), torch.tensor([[1, 1, 0, 1]]))
    assert rewards.tolist() == [[0, 0, 0, 1]]
    assert discounted_returns(rewards, torch.tensor([[1, 1, 0, 1]])).tolist() == [[1, 1, 0, 1]]
    half = discounted_returns(rewards, torch.tensor([[1, 1, 0, 1]]), 0.5)
    assert half.tolist() == [[0.25, 0.5, 0, 1]]  # the hole is no step


def test_terminal_rewards() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]])
    kl = torch.tensor([[9.0, 1, 2, 9], [9, 9, 9, 9], [1, torch.nan, 3, torch.inf]])
    found = terminal_rewards(torch.tensor([1.0, 5.0, -1.0]), mask, kl, 0.5)
    assert found.tolist() == [[0, -0.5, 0, 0], [0, 0, 0, 0], [-0.5, 0, -2.5, 0]]
    assert terminal_rewards(torch.ones(2), torch.ones(2, 0)).shape == (2, 0)
    with pytest.raises(ValueError, match=r"kl_coefficient = 0\.5 needs kl"):
        terminal_rewards(torch.ones(3), mask, None, 0.5)


def test_length_adaptive_lambda() -> None:
    mask = torch.tensor([[1] * 4, [1, 0, 0, 0], [0] * 4])
    assert length_adaptive_lambda(mask, 0.5).tolist() == [0.5, 0.0, 0.0]
    assert length_adaptive_lambda(torch.ones(1, 100), 0.05).tolist() == pytest.approx([0.8])


def test_no_scan_waits_for_the_device_nor_grows_with_time() -> None:
    counts = []
    for width in (65, 128):
        with Watch() as watch:
            gae(torch.ones(3, width), torch.ones(3, width), torch.ones(3, width), 0.99, 0.95, 1.0, torch.ones(3))
        assert not watch.syncs
        counts.append(watch.operators)
    assert counts[0] == counts[1]  # both take 7 doublings


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: discounted_returns(x, m[:, :2]), r"must be \[N, S\] alike, got \[3, 4\] and \[3, 2\]"),
        (lambda x, m: discounted_returns(x, m, 1.5), r"gamma = 1.5 must lie in \[0, 1\]"),
        (lambda x, m: gae(x, x[0], m), r"must be \[N, S\] alike, got \[4\]"),
        (lambda x, m: gae(x, x, m, 1.0, -0.1), r"lam = -0.1 must lie in \[0, 1\]"),
        (lambda x, m: gae(x, x, m, 1.0, 0.9, 2.0), r"value_lam = 2.0 must lie in \[0, 1\]"),
    ],
)
def test_bad_input(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call(REWARDS, MASK)
