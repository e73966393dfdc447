"""A teacher's KL beside any estimator: verl's clamps and slime's sum, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_rl.advantages import AdvantageEstimator, estimate
from tests.advantages.test_estimate import MASK, batch

ESTIMATORS = [name for name in AdvantageEstimator.variants if name != "on_policy_distillation"]


def by_hand(kind: str, policy: float, teacher: float, floor: float | None, most: float | None) -> float:
    """Of one token, as verl computes a distillation loss: log-probs clamped, the estimate, its clamp."""
    if floor is not None:
        policy, teacher = max(policy, floor), max(teacher, floor)
    d = teacher - policy
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d, "abs": abs(d)}[kind]
    return value if most is None else max(-most, min(most, value))


def taught(data: dict[str, Tensor], coefficient: float, *options: object) -> Tensor:
    out = torch.zeros(MASK.shape, dtype=torch.float64)
    for i, t in MASK.nonzero().tolist():
        pair = data["prev_logprobs"][i, t].item(), data["teacher_token_logprobs"][i, t].item()
        kind, floor, most = options
        out[i, t] = -coefficient * by_hand(str(kind), *pair, floor, most)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("name", ESTIMATORS)
def test_it_is_added_to_the_advantage_of_any_estimator(name: str) -> None:
    """After the estimator's own arithmetic; the value function's targets do not see it, and what is masked has no say."""
    data = batch()
    alone = estimate({"name": name, "whiten": "none"}, data)
    want = alone.advantages + taught(data, 0.7, "k1", None, None)
    for field in ("prev_logprobs", "teacher_token_logprobs"):
        data[field] = torch.where(MASK.bool(), data[field], math.nan)
    found = estimate({"name": name, "whiten": "none", "teacher_kl": {"coefficient": 0.7}}, data)
    torch.testing.assert_close(found.advantages, want)
    torch.testing.assert_close(found.returns, alone.returns)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize(("floor", "most"), [(None, None), (-0.5, None), (None, 0.3), (-0.5, 0.3)])
def test_estimators_and_clamps(kind: str, floor: float | None, most: float | None) -> None:
    data = batch()
    options = {"estimator": kind, "log_prob_min_clamp": floor, "loss_max_clamp": most, "coefficient": 2.0}
    want = taught(data, 2.0, kind, floor, most)
    rewards = {**data, "rewards": torch.zeros(4, dtype=torch.float64)}
    torch.testing.assert_close(estimate({"name": "reinforce", "teacher_kl": options}, rewards).advantages, want)
    torch.testing.assert_close(estimate({"name": "on_policy_distillation", **options}, data).advantages, want)


def test_it_comes_before_whitening_and_the_clip() -> None:
    data = batch()
    whole = estimate("grpo", data).advantages + taught(data, 1.0, "k1", None, None)
    valid = whole[MASK.bool()]
    white = (whole - valid.mean()) / valid.std(correction=0)
    options = {"name": "grpo", "teacher_kl": {}, "whiten": "population", "clip_low": -1.0, "clip_high": 0.8}
    want = torch.where(MASK.bool(), white.clamp(-1.0, 0.8), 0.0)
    torch.testing.assert_close(estimate(options, data).advantages, want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficient": 0.0}, "coefficient = 0.0 must be above 0"),
        ({"log_prob_min_clamp": 1.0}, "log_prob_min_clamp = 1.0 must be below 0, as log-probs are"),
        ({"loss_max_clamp": -1.0}, "loss_max_clamp = -1.0 must be above 0"),
        ({"estimator": "k4"}, "estimator.*k4"),
        ({"coef": 1.0}, "coef.*did you mean 'coefficient'"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate({"name": "grpo", "teacher_kl": options}, batch())
    if "coef" not in options:
        with pytest.raises(ValueError, match=message):
            estimate({"name": "on_policy_distillation", **options}, batch())


def test_what_is_missing_or_too_much() -> None:
    data = batch()
    del data["teacher_token_logprobs"]
    with pytest.raises(ValueError, match=r"advantages 'grpo' need the field teacher_token_logprobs \[N, S\]"):
        estimate({"name": "grpo", "teacher_kl": {}}, data)
    with pytest.raises(ValueError, match=r"teacher_kl = .* has no effect on on_policy_distillation"):
        estimate({"name": "on_policy_distillation", "teacher_kl": {}}, batch())
