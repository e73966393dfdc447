"""The pairwise reward loss: kinds, margins, pooled and per-token heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl import ParallelGroups, PreferenceLoss, count_valid, reduce_metrics
from parallel_rl.functional.preference import cross_entropy, hps, log_exp, log_sigmoid
from parallel_rl.testing.batches import ROWS, make_batch
from parallel_rl.testing.pool import preload, run_world
from tests import reference_heads
from tests.losses.steps import cut, step

preload("parallel_rl", "tests.losses.test_reward")

REWARDS = [1.0, 0.5, -0.2, 0.3]
MARGINS = [0.4, math.inf, 0.1, 9.0]  # those of rejected rows are never read


def pooled(shape: tuple[int, ...] = (4,), values: list[float] = REWARDS) -> tuple[Tensor, dict[str, Tensor]]:
    rewards = torch.tensor(values, dtype=torch.float64)
    return rewards.view(shape), {"sample_mask": torch.ones(4), "token_mask": torch.ones(4, 1)}


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize(
    ("config", "logits_of_pairs", "slope"),
    [
        ({}, (0.5, -0.5), 1.0),
        ({"kind": "log-exp"}, (0.5, -0.5), 1.0),
        ({"kind": "hps"}, (0.5, -0.5), 1.0),
        ({"kind": "hps", "score_temperature": 0.25}, (2.0, -2.0), 4.0),
        ({"margin": 0.1}, (0.4, -0.6), 1.0),
        ({"margin": -0.1, "pair_margins": True}, (0.2, -0.5), 1.0),
    ],
    ids=str,
)
def test_values_and_gradients(
    config: dict[str, Any], logits_of_pairs: tuple[float, float], slope: float, shape: tuple[int, ...]
) -> None:
    rewards, data = pooled(shape)
    data["preference_margins"] = torch.tensor(MARGINS, dtype=torch.float64)
    got = step(PreferenceLoss(config), rewards, data)
    assert got.loss == pytest.approx(sum(-math.log(sigma(x)) for x in logits_of_pairs) / 2, rel=1e-12)
    expected = [sign * -slope * sigma(-x) / 2 for x in logits_of_pairs for sign in (1, -1)]
    assert got.gradient.flatten().tolist() == pytest.approx(expected, rel=1e-12)
    assert got.metrics["accuracy"] == 0.5 and got.metrics["num_valid_samples"] == 2


@pytest.mark.parametrize("kind", ["sigmoid", "log-exp", "hps"])
def test_far_rewards_do_not_overflow(kind: str) -> None:
    """Q21: log(1 + e^x) as it stands is inf from x = 88 on in float32."""
    rewards, data = pooled(values=[-500.0, 500.0, 500.0, -500.0])
    got = step(PreferenceLoss({"kind": kind}), rewards.float(), data)
    assert got.loss == pytest.approx(500.0) and bool(got.gradient.isfinite().all())


def test_the_names_are_one_function_where_they_say_so() -> None:
    chosen, rejected = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = log_sigmoid(chosen, rejected)
    torch.testing.assert_close(log_exp(chosen, rejected), want, rtol=1e-14, atol=0)
    torch.testing.assert_close(hps(chosen, rejected), want, rtol=1e-14, atol=0)
    scores, first = torch.stack([chosen, rejected], 1), torch.zeros(50, dtype=torch.int64)  # Q22: a new axis
    classes = torch.nn.functional.cross_entropy(scores / 0.3, first, reduction="none")
    torch.testing.assert_close(hps(chosen, rejected, 0.3), classes, rtol=1e-12, atol=1e-15)


def test_cross_entropy_of_classes_and_of_shares() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(6, 3, dtype=torch.float64, generator=g)
    q = torch.rand(6, 3, dtype=torch.float64, generator=g).softmax(-1)
    twin = torch.nn.functional.cross_entropy(z, q, reduction="none")
    torch.testing.assert_close(cross_entropy(z, q), twin, rtol=1e-13, atol=0)
    z[0, 1] = -math.inf  # a class that cannot be, with share 0
    q[0] = torch.tensor([0.5, 0.0, 0.5])
    assert bool(cross_entropy(z, q).isfinite().all())


@pytest.mark.parametrize("config", [{}, {"margin": 0.3}, {"margin": 0.1, "pair_margins": True}], ids=str)
def test_against_a_second_expression(config: dict[str, Any]) -> None:
    batch = make_batch(6, False, "preference", torch.float64)
    leaf = batch.logits.clone().requires_grad_()
    want, metrics = reference_heads.preference(leaf, batch.data, config)
    want.backward()
    got = step(PreferenceLoss(config), batch.logits, batch.data)
    assert got.loss == pytest.approx(want.item(), rel=1e-13)
    assert got.metrics == pytest.approx(metrics, rel=1e-12)
    torch.testing.assert_close(got.gradient, leaf.grad, rtol=1e-12, atol=1e-16)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(ROWS // 2)), cuts=st.sets(st.integers(1, ROWS // 2 - 1)), pool=st.booleans())
def test_the_order_of_pairs_and_their_micro_batches_change_nothing(
    order: list[int], cuts: set[int], pool: bool
) -> None:
    batch = make_batch(6, False, "preference", torch.float64)
    head = batch.logits[:, 3, 0].contiguous() if pool else batch.logits
    loss_fn = PreferenceLoss({"pair_margins": True})
    whole = step(loss_fn, head, batch.data)
    split = step(loss_fn, head, batch.data, cut(order, cuts, pairs=True))
    assert split.loss == pytest.approx(whole.loss, rel=1e-13)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-13)
    torch.testing.assert_close(split.gradient, whole.gradient, rtol=1e-12, atol=1e-16)


def test_masked_pairs_may_hold_anything() -> None:
    rewards, data = pooled()
    data["preference_margins"] = torch.tensor([0.4, 0.0, math.nan, math.nan], dtype=torch.float64)
    data["sample_mask"][2:] = 0
    rewards[2:] = math.nan
    got = step(PreferenceLoss({"pair_margins": True}), rewards, data)
    assert got.loss == pytest.approx(-math.log(sigma(0.1))) and not got.gradient[2:].any()


def on_two_context_ranks(rank: int) -> tuple[float, Tensor, dict[str, float]]:
    rewards, data = pooled()
    leaf = rewards.clone().requires_grad_()
    loss, metrics = PreferenceLoss()(leaf, data, *count_valid(data), context_parallel_group=dist.group.WORLD)
    loss.backward()
    assert leaf.grad is not None
    reduced = reduce_metrics([metrics], ParallelGroups(context=dist.group.WORLD))
    return loss.item(), leaf.grad, {name: value.item() for name, value in reduced.items()}


def test_a_pooled_head_is_shared_by_its_context_ranks() -> None:
    """Each holds the same rewards; shares and gradients add up to those of one process."""
    (loss, gradient, metrics), (other, more, _) = run_world(2, on_two_context_ranks)
    want = step(PreferenceLoss(), *pooled())
    assert loss + other == pytest.approx(want.loss, rel=1e-14) and metrics == pytest.approx(want.metrics, rel=1e-14)
    torch.testing.assert_close(gradient + more, want.gradient, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "log-exp", "margin": 0.1}, "margin = 0.1 has no effect with kind = 'log-exp'; use 'sigmoid'"),
        ({"kind": "hps", "pair_margins": True}, "pair_margins = True has no effect with kind = 'hps'"),
        ({"score_temperature": 0.5}, "score_temperature = 0.5 has no effect with kind = 'sigmoid'; use 'hps'"),
        ({"kind": "hps", "score_temperature": 0.0}, "score_temperature = 0.0 must be positive"),
        ({"kind": "logexp"}, "kind = 'logexp' is not valid; choose one of 'sigmoid', 'log-exp', 'hps'"),
    ],
)
def test_configs_that_do_not_do(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceLoss(config)


def test_missing_margins_are_named() -> None:
    rewards, data = pooled()
    with pytest.raises(ValueError, match="data lacks the field 'preference_margins'"):
        step(PreferenceLoss({"pair_margins": True}), rewards, data)
