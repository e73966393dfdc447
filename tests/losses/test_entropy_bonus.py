"""The coefficient of the entropy bonus over the steps: schedules by their formula, adaptive control as its paper has it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from parallel_rl import MixLossFn, PolicyLossFn, count_valid
from tests.losses.test_policy import dense_valid, random_batch

ADAPTIVE = {"name": "adaptive", "target": 1.5, "initial": 0.02, "delta": 0.01, "low": 0.01, "high": 0.04}


def coefficients(option: dict[str, Any], entropies: list[float]) -> list[float]:
    """Those that the steps with these entropies apply, and that of the step after them."""
    loss_fn = PolicyLossFn({"entropy_bonus": option})
    found = [loss_fn.entropy_bonus.value]
    for entropy in entropies:
        loss_fn.after_step({"entropy": entropy, "loss": 0.0})
        found.append(loss_fn.entropy_bonus.value)
    return found


def test_the_adaptive_coefficient_follows_the_last_step() -> None:
    """Applied only after a step at or below the target; it moves after every step, within its bounds."""
    entropies = [1.4, 1.5, 1.6, 1.2, 1.0, 0.9, 0.8, 2.0, 2.0, 2.0, 2.0, 1.0]
    held, applied = 0.02, [0.0]
    for entropy in entropies:
        low = entropy <= 1.5
        held = min(held + 0.01, 0.04) if low else max(held - 0.01, 0.01)
        applied.append(held if low else 0.0)
    assert coefficients(ADAPTIVE, entropies) == pytest.approx(applied, abs=1e-15)
    assert max(applied) == pytest.approx(0.04) and applied[-1] == pytest.approx(0.02)


def test_schedules_follow_their_formulas() -> None:
    """Constant and then down on a cosine; on a line to nothing."""
    held = {"name": "schedule", "start": 0.03, "peak": 0.03, "valley": 0.01, "warmup_steps": 2, "decay_steps": 4}
    cosine = [0.01 + 0.02 * 0.5 * (1 + math.cos(math.pi * min(max(s - 2, 0) / 4, 1))) for s in range(10)]
    assert coefficients(held, [0.0] * 9) == pytest.approx(cosine, abs=1e-15)
    assert cosine[:3] == [0.03] * 3 and cosine[-1] == pytest.approx(0.01)
    line = {"name": "schedule", "start": 0.2, "peak": 0.0, "valley": 0.0, "warmup_steps": 4}
    assert coefficients(line, [0.0] * 5) == pytest.approx([0.2, 0.15, 0.1, 0.05, 0.0, 0.0], abs=1e-15)


def test_the_loss_takes_the_present_coefficient_of_the_entropy() -> None:
    logits, data = random_batch()
    counts, bonus = count_valid(data), PolicyLossFn({"surrogate": "reinforce", "entropy_bonus": ADAPTIVE})
    plain, of_plain = PolicyLossFn({"surrogate": "reinforce"})(logits, data, *counts)
    logs, valid = logits.log_softmax(-1), dense_valid(data)
    entropy = -(logs.exp() * logs).sum(-1)[:, :-1][valid[:, 1:]].mean()
    assert of_plain["entropy"].item() == pytest.approx(entropy.item(), rel=1e-12)
    for coefficient, measured in ((0.0, 1.0), (0.03, 1.0), (0.04, 3.0), (0.0, 1.0), (0.04, 1.0)):
        other = logits.detach().requires_grad_()
        loss, metrics = bonus(other, data, *counts)
        loss.backward()
        want = plain - coefficient * entropy
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
        (gradient,) = torch.autograd.grad(want, logits, retain_graph=True)
        torch.testing.assert_close(other.grad, gradient, rtol=1e-10, atol=1e-14)
        assert metrics["entropy_coef"].item() == pytest.approx(coefficient)
        bonus.after_step({"entropy": measured})


OPTIONS: list[dict[str, Any]] = [ADAPTIVE, {"name": "schedule", "peak": 0.03, "valley": 0.0, "decay_steps": 6}]


def policy_of(loss_fn: PolicyLossFn | MixLossFn) -> PolicyLossFn:
    inner = loss_fn if isinstance(loss_fn, PolicyLossFn) else loss_fn.components[0].loss
    assert isinstance(inner, PolicyLossFn)
    return inner


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option["name"])
def test_the_state_goes_on(option: dict[str, Any]) -> None:
    """Also inside of MIX, whose own schedule stands beside it."""
    for make in (
        lambda: PolicyLossFn({"entropy_bonus": option}),
        lambda: MixLossFn({"policy": {"entropy_bonus": option}}),
    ):
        one, values = make(), []
        inner = policy_of(one)
        for step in range(8):
            entropy = 1.0 + 0.2 * (step % 5)
            one.after_step({"entropy": entropy, "usual/entropy": entropy})
            values.append(inner.entropy_bonus.value)
            if step == 3:
                state = one.state_dict()
        other = make()
        other.load_state_dict(state)
        inner = policy_of(other)
        assert inner.entropy_bonus.value == values[3]
        for step in range(4, 8):
            entropy = 1.0 + 0.2 * (step % 5)
            other.after_step({"entropy": entropy, "usual/entropy": entropy})
            assert inner.entropy_bonus.value == values[step]
        assert other.state_dict() == one.state_dict()
        assert set(make().state_dict()) == set(state)  # named from the start on
    with pytest.raises(ValueError, match="the state of this entropy bonus has"):
        PolicyLossFn({"entropy_bonus": option}).load_state_dict({"steps": 3})
    assert PolicyLossFn({"entropy_bonus": 0.1}).state_dict() == {}
    with pytest.raises(ValueError, match=r"the state of this entropy bonus has \[\], got"):
        PolicyLossFn({"entropy_bonus": 0.1}).load_state_dict(PolicyLossFn({"entropy_bonus": option}).state_dict())


def test_without_its_metric_it_says_so() -> None:
    with pytest.raises(ValueError, match="reads the metric 'entropy', got loss"):
        PolicyLossFn({"entropy_bonus": ADAPTIVE}).after_step({"loss": 1.0})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (-0.1, "entropy_bonus = -0.1 must be at least 0 and finite"),
        (math.inf, "entropy_bonus = inf must be at least 0 and finite"),
        ("adaptiv", "entropy_bonus.name = 'adaptiv' is not valid; did you mean 'adaptive'"),
        ({"target": 0.2}, "'name', one of schedule, adaptive"),
        ({"name": "adaptive"}, "needs the key 'target'"),
        ({"name": "adaptive", "target": 0.0}, "entropy_bonus: target = 0.0 must be positive and finite"),
        ({**ADAPTIVE, "delta": 0.0}, "delta = 0.0 must be positive"),
        ({**ADAPTIVE, "low": 0.5}, "low = 0.5 must be below high = 0.04"),
        ({**ADAPTIVE, "initial": 0.5}, r"initial = 0.5 must lie in \[low, high\] = \[0.01, 0.04\]"),
        ({**ADAPTIVE, "taget": 0.5}, "did you mean 'target'"),
        ({"name": "schedule", "peak": 0.1, "valley": 0.0}, "which is not a schedule"),
        ({"name": "schedule", "peak": 0.1, "valley": 0.0, "decay_steps": -1}, "decay_steps = -1 must be at least 0"),
        ({"name": "schedule", "peak": -0.1, "valley": 0.0, "decay_steps": 3}, "peak = -0.1 must be at least 0"),
        (
            {"name": "schedule", "peak": 0.1, "valley": 0.0, "decay_steps": 3, "start": 0.2},
            "no effect without warmup_steps",
        ),
        ({"name": "schedule", "peek": 0.1, "valley": 0.0, "decay_steps": 3}, "did you mean 'peak'"),
    ],
)
def test_options_that_do_not_do(option: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLossFn({"entropy_bonus": option})
