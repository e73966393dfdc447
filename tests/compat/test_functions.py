"""LightRFT's pure functions."""

from __future__ import annotations

import pytest
import torch

from parallel_rl.compat import lightrft


def test_kl_estimates_are_zero_where_masked_and_never_clamped() -> None:
    policy, base = torch.tensor([[-1.0, -2.0, torch.nan]]), torch.tensor([[-1.5, 10.0, torch.inf]])
    mask = torch.tensor([[1, 1, 0]])
    d = (base - policy)[0, :2]
    for kind, expected in (("k1", -d), ("k2", d**2 / 2), ("k3", d.exp() - 1 - d)):
        found = lightrft.compute_approx_kl(policy.double(), base.double(), mask, kind)
        torch.testing.assert_close(found, torch.cat([expected, torch.zeros(1)])[None])
        assert found.dtype == torch.float32
    with pytest.raises(ValueError, match="kl_estimator = 'k4' is not valid"):
        lightrft.compute_approx_kl(policy, base, mask, "k4")


def test_rewards_stand_at_the_last_action() -> None:
    r, kl = torch.tensor([12.0, -3.0, 1.0]), torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    expected = -0.5 * kl
    expected[0, 1] += 10.0
    expected[1, 2] += -3.0
    expected[2, 2] += 1.0  # an empty row: the last column
    torch.testing.assert_close(lightrft.compute_reward(r, 0.5, kl, mask, None, (-5.0, 10.0)), expected)
    torch.testing.assert_close(
        lightrft.compute_reward(r, -0.5, kl, mask), torch.tensor([[0, 12.0, 0], [0, 0, -3.0], [0, 0, 1.0]])
    )
    packed = lightrft.compute_reward(r[:2], 0.5, [kl[0, :2], kl[1]], None, [2, 3], (-5.0, 10.0))
    torch.testing.assert_close(packed, [torch.tensor([-0.05, 9.9]), torch.tensor([-0.2, -0.25, -3.3])])


def test_high_entropy_tokens_by_row() -> None:
    entropy = torch.tensor([[1.0, 5.0, 2.0, 6.0, 3.0], [2.0, 4.0, 1.0, 5.0, torch.nan], [1.0, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
    expected = torch.tensor([[0.0, 1, 0, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    torch.testing.assert_close(lightrft.create_high_entropy_mask(entropy, mask, 0.4), expected)
    assert lightrft.create_high_entropy_mask(entropy, mask, 0.01).sum(1).tolist() == [1, 1, 0]
    for ratio in (0.0, 1.0):
        assert torch.equal(lightrft.create_high_entropy_mask(entropy, mask, ratio), mask)
    assert lightrft.create_high_entropy_mask(entropy, None, 0.0).eq(1).all()
    with pytest.raises(ValueError, match=r"must both be \[B, A\]"):
        lightrft.create_high_entropy_mask(entropy, mask[:2], 0.2)
    # A masked token counts as an entropy of 0, and wins over a valid one below it.
    below = lightrft.create_high_entropy_mask(torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[1, 1, 0]]), 0.5)
    assert below.tolist() == [[0, 0, 1]]


def test_weights_make_up_for_prompts_without_a_difference() -> None:
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    weights = lightrft.clip_filter_like_weight_func(rewards, lamda=0.5)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 2.0], [0.5, 0.5], [0.5, 0.5], [2.0, 2.0]]))
    assert lightrft.clip_filter_like_weight_func(rewards, 1.5)[0, 0] == 1.5
    assert lightrft.clip_filter_like_weight_func(rewards[1:3]).eq(1).all()


def test_masked_means() -> None:
    x, mask = torch.tensor([[1.0, 2.0, torch.nan], [4.0, 5.0, torch.inf]]), torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert lightrft.masked_mean(x, mask).item() == 1.5
    assert lightrft.masked_mean(x, mask, dim=-1).tolist() == [1.5, 0.0]
    assert lightrft.masked_mean(x[:, :2], None).item() == 3.0


def test_log_probs_and_entropies_of_logits() -> None:
    logits, labels = torch.randn(2, 3, 7, dtype=torch.float64), torch.randint(0, 7, (2, 3))
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(
        lightrft.log_probs_from_logits(logits, labels), log_p.gather(-1, labels[..., None])[..., 0]
    )
    torch.testing.assert_close(lightrft.entropy_from_logits(logits), -(log_p.exp() * log_p).sum(-1))


def test_returns_and_advantages_run_through_holes() -> None:
    values, rewards = torch.rand(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
    values[0, 1] = rewards[0, 4] = torch.nan
    returns = lightrft.get_cumulative_returns(rewards, mask, 0.9)
    advantages, targets = lightrft.get_advantages_and_returns(values, rewards, mask, 0.9, 0.8)
    for i in range(2):
        total = advantage = following = 0.0
        for t in reversed(range(5)):
            r, v = (x[i, t].item() if mask[i, t] else 0.0 for x in (rewards, values))
            total = r + 0.9 * total
            advantage, following = r + 0.9 * following - v + 0.9 * 0.8 * advantage, v
            assert returns[i, t].item() == pytest.approx(total)
            assert (advantages[i, t].item(), targets[i, t].item()) == pytest.approx((advantage, advantage + v))
    packed = lightrft.get_advantages_and_returns(
        [values[1], values[1, :3]], [rewards[1], rewards[1, :3]], None, 0.9, 0.8
    )
    torch.testing.assert_close(packed[0][0], advantages[1])
    torch.testing.assert_close(lightrft.get_cumulative_returns([rewards[1]], None, 0.9)[0], returns[1])


def test_packed_rows_are_cut() -> None:
    parts = lightrft.unpacking_samples(torch.arange(8)[None], [3, 2, 3])
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6, 7]]


def test_kl_controllers() -> None:
    fixed = lightrft.FixedKLController(0.1)
    fixed.update(9.0, 64)
    assert fixed.value == 0.1
    adaptive = lightrft.AdaptiveKLController(0.1, target=6.0, horizon=10000)
    adaptive.update(12.0, 500)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.2 * 500 / 10000))
