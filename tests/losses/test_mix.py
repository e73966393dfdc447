"""MIX and CHORD against the two losses that they mix, and the schedule of μ."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from parallel_rl import (
    MixLossFn,
    MuSchedule,
    NLLLoss,
    PolicyLossFn,
    count_valid,
    reduce_metrics,
)
from parallel_rl.losses import MuScheduleConfig
from parallel_rl.testing.cases import step_statistics
from tests.losses.test_golden import MASK, OLD, L, coefficients, make

CHORD = {"peak": 0.9, "valley": 0.05, "warmup_steps": 10, "decay_steps": 10}


def both_sides(expert: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    logits, data = make()
    return logits, {**data, "expert_mask": torch.tensor(expert).bool()}


def run(config: dict, logits: Tensor, data: dict[str, Tensor], cuts: list[slice] | None = None) -> tuple:
    """Loss, gradient and metrics, over micro-batches."""
    loss_fn, counts, leaf = MixLossFn(config), count_valid(data), logits.detach().clone().requires_grad_()
    parts = [
        (leaf[rows], {name: value[rows] for name, value in data.items()}, *counts) for rows in cuts or [slice(0, 3)]
    ]
    statistics = step_statistics([(loss_fn, part) for part in parts])
    outcomes = [loss_fn(*part, statistics=statistics) for part in parts]
    total = sum(loss for loss, _ in outcomes)
    total.backward()
    metrics = reduce_metrics([parts for _, parts in outcomes])
    return total.item(), leaf.grad, {name: value.item() for name, value in metrics.items()}


def test_by_hand() -> None:
    """Row 1 is an expert's: 4 of its tokens; rows 0 and 2 are the policy's, 5 tokens. PPO with clip 0.2."""
    logits, data = both_sides([0, 1, 0])
    loss, gradient, metrics = run({"mu": 0.3}, logits, data)
    usual, slope = 0.0, {}
    for i in (0, 2):
        for t in range(4):
            if MASK[i][t]:
                a, ratio = (1.0, -2.0)[i // 2], math.exp(L[i][t] - OLD[i][t])
                plain, clipped = -a * ratio, -a * min(max(ratio, 0.8), 1.2)
                usual += max(plain, clipped) / 5
                slope[i, t] = 0.7 * plain / 5 if plain >= clipped else 0.0
    expert = -sum(L[1]) / 4
    assert loss == pytest.approx(0.7 * usual + 0.3 * expert, rel=1e-12)
    assert coefficients(gradient) == pytest.approx([slope[0, 0], -0.3 / 4, slope[2, 0]], rel=1e-9)
    assert metrics["usual/loss"] == pytest.approx(usual, rel=1e-12) and metrics["expert/loss"] == pytest.approx(expert)
    assert metrics["mu"] == 0.3 and metrics["loss"] == loss
    assert metrics["usual/num_valid_samples"] == 2 and metrics["expert/num_unmasked_tokens"] == 4


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("cuts", [None, [slice(0, 1), slice(1, 3)], [slice(0, 2), slice(2, 3)]])
def test_each_side_is_the_loss_of_its_rows_alone(aggregation: str, cuts: list[slice] | None) -> None:
    logits, data = both_sides([0, 1, 1])
    config = {
        "mu": 0.4,
        "policy": {"aggregation": aggregation, "surrogate": {"name": "ppo", "dual_clip": 3.0}, "entropy_bonus": 0.1},
        "supervised": {"aggregation": aggregation, "weighting": "phi"},
    }
    loss, gradient, _ = run(config, logits, data, cuts)
    leaf = logits.detach().clone().requires_grad_()
    usual = (leaf[:1], {name: value[:1] for name, value in data.items()})
    expert = (leaf[1:], {name: value[1:] for name, value in data.items()})
    policy, _ = PolicyLossFn(config["policy"])(*usual, *count_valid(usual[1]))  # type: ignore[arg-type]
    nll, _ = NLLLoss(config["supervised"])(*expert, *count_valid(expert[1]))  # type: ignore[arg-type]
    want = 0.6 * policy + 0.4 * nll
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-12)
    assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("expert", [[0, 0, 0], [1, 1, 1]])
def test_an_empty_side_is_an_exact_zero(aggregation: str, expert: list[int]) -> None:
    """Q37: the origin's sequence means of no sequence are NaN."""
    logits, data = both_sides(expert)
    options = {"aggregation": aggregation}
    loss, gradient, metrics = run({"mu": 0.3, "policy": options, "supervised": options}, logits, data)
    alone = (NLLLoss if expert[0] else PolicyLossFn)(options)(logits, data, *count_valid(data))[0]  # type: ignore[abstract]
    assert loss == pytest.approx((0.3 if expert[0] else 0.7) * alone.item(), rel=1e-12)
    assert metrics["usual/loss" if expert[0] else "expert/loss"] == 0
    assert gradient.isfinite().all()


def test_a_policy_that_looks_at_the_whole_step_sees_its_own_rows_only() -> None:
    """Neither the quantile of the entropies nor the mean importance weight moves with the expert's row."""
    logits, data = both_sides([0, 1, 0])
    config = {"mu": 0.3, "policy": {"surrogate": "reinforce", "entropy_filter": 0.4}}
    metrics = run(config, logits, data)[2]
    usual = [0, 2]
    rows = (logits[usual], {name: value[usual] for name, value in data.items()})
    policy, counts = PolicyLossFn(config["policy"]), count_valid(rows[1])  # type: ignore[arg-type]
    alone, _ = policy(*rows, *counts, statistics=policy.collect(*rows, *counts))
    assert metrics["usual/loss"] == pytest.approx(alone.item(), rel=1e-12)
    importance = {"mu": 0.3, "policy": {"importance": {"normalize": True}}}
    policy = PolicyLossFn(importance["policy"])  # type: ignore[arg-type]
    alone, _ = policy(*rows, *counts, statistics=policy.count(rows[1]))
    assert run(importance, logits, data)[2]["usual/loss"] == pytest.approx(alone.item(), rel=1e-12)


def test_fields_of_the_other_side_do_not_matter() -> None:
    logits, data = both_sides([0, 1, 0])
    right = run({"mu": 0.3}, logits, data)
    for name in ("advantages", "prev_logprobs"):
        data[name] = data[name].clone()
        data[name][1] = 50.0
    loss, gradient, metrics = run({"mu": 0.3}, logits, data)
    assert (loss, metrics) == (right[0], right[2]) and torch.equal(gradient, right[1])


@pytest.mark.parametrize(
    ("step", "mu"), [(0, 0.0), (5, 0.45), (9, 0.81), (10, 0.9), (11, 0.8792), (15, 0.475), (20, 0.05), (500, 0.05)]
)
def test_the_schedule_of_chord(step: int, mu: float) -> None:
    schedule = MuSchedule(MuScheduleConfig(**CHORD))
    for _ in range(step):
        schedule.step()
    assert schedule.mu == pytest.approx(mu, abs=5e-5)
    assert schedule.mu == schedule.at(step)


def test_without_decay_it_jumps_to_the_valley() -> None:
    schedule = MuSchedule(MuScheduleConfig(peak=0.8, valley=0.2, warmup_steps=4))
    assert [schedule.at(step) for step in (0, 3, 4, 5)] == pytest.approx([0.0, 0.6, 0.2, 0.2])
    assert MuSchedule(MuScheduleConfig()).at(7) == 0.1


def test_the_state_of_the_schedule_is_saved_and_restored() -> None:
    logits, data = both_sides([0, 1, 0])
    loss_fn, counts = MixLossFn({"mu": CHORD}), count_valid(data)
    statistics = loss_fn.count(data)
    losses = []
    for _ in range(13):
        losses.append(loss_fn(logits, data, *counts, statistics=statistics)[0].item())
        loss_fn.mu_schedule.step()
    state = loss_fn.mu_schedule.state_dict()
    resumed = MixLossFn({"mu": CHORD})
    assert resumed(logits, data, *counts, statistics=statistics)[0].item() == losses[0] != losses[5]
    resumed.mu_schedule.load_state_dict(state)
    assert resumed.mu_schedule.mu == loss_fn.mu_schedule.mu == MuSchedule(MuScheduleConfig(**CHORD)).at(13)
    for bad in ({}, {"steps": -1}, {"steps": 2.5}, {"steps": True}, {"steps": 1, "more": 2}):
        with pytest.raises(ValueError, match="the state of a MuSchedule is"):
            resumed.mu_schedule.load_state_dict(bad)  # type: ignore[arg-type]
    assert resumed.mu_schedule.steps == 13


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mu": 1.5}, r"mu = 1.5 must lie in \[0, 1\]"),
        ({"mu": {"peek": 0.3}}, r"unknown key mu.peek = 0.3 in MuScheduleConfig; did you mean 'peak'"),
        ({"mu": {"peak": -0.1}}, r"mu: peak = -0.1 must lie in \[0, 1\]"),
        ({"mu": {"decay_steps": -3}}, "mu: decay_steps = -3 must be at least 0"),
        ({"mu": {"peak": 0.9}}, "mu: peak = 0.9 has no effect without warmup_steps or decay_steps"),
        ({"supervised": {"cutoff_prob": 0.3}}, "supervised: cutoff_prob = 0.3 has no effect with weighting = 'none'"),
        ({"policy": {"surrogate": "pp"}}, "policy.surrogate.name = 'pp' is not valid"),
    ],
)
def test_configs_that_do_not_do(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixLossFn(config)
