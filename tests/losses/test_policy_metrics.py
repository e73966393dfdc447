"""What the policy loss logs, number by number against its definition in Python's floats, and what it leaves out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import ClippedPGLossFn, LMHeadInput, PolicyLossFn, count_valid, reduce_metrics
from parallel_rl.losses.policy_metrics import DESCRIPTIONS
from tests.losses.test_policy import B, dense_logprobs, dense_valid, random_batch

AGAINST_SAMPLER = {
    "sampling_logp_difference", "sampling_logp_difference_max", "gen_kl_error", "policy_kl_error", "token_mult_prob_error",
    "chi2_token", "rollout_is_eff_sample_size", "rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low",
    "training_log_ppl", "rollout_log_ppl", "log_ppl_diff",
}  # fmt: skip


def metrics_of(
    config: dict[str, Any], logits: Tensor, data: dict[str, Tensor], rows: tuple[slice, ...] = (slice(0, B),)
) -> dict[str, float]:
    """Of one step, in as many calls as there are slices of rows."""
    loss_fn, counts, found = PolicyLossFn(config), count_valid(data), []
    parts = [{name: x[part] for name, x in data.items()} for part in rows]
    calls = [(logits[part], local, *counts) for part, local in zip(rows, parts, strict=True)]
    statistics = loss_fn.count(parts) if loss_fn.needs_statistics else None
    if loss_fn.needs_collect:
        collected = [loss_fn.collect(*call) for call in calls]
        statistics |= sum(collected[1:], collected[0]).reduce()  # type: ignore[operator]
    for call in calls:
        found.append(loss_fn(*call, statistics=statistics)[1])
    return {name: value.item() for name, value in reduce_metrics(found).items()}


THIRDS = (slice(0, 2), slice(2, 5), slice(5, B))


def tokens(logits: Tensor, data: dict[str, Tensor]) -> list[tuple[float, float, float, float]]:
    """(l, l_prev, l_generation, A) of each valid token."""
    logp, valid = dense_logprobs(logits, data["input_ids"]), dense_valid(data)
    fields = (logp.detach(), data["prev_logprobs"], data["generation_logprobs"], data["advantages"])
    return list(zip(*(x[valid].tolist() for x in fields), strict=True))  # type: ignore[arg-type]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("rows", [(slice(0, B),), THIRDS], ids=["one call", "three calls"])
def test_trainer_against_sampler(rows: tuple[slice, ...]) -> None:
    logits, data = random_batch(3)
    found = metrics_of({}, logits, data, rows)
    each = tokens(logits, data)
    a = [prev - gen for _, prev, gen, _ in each]
    w = [math.exp(x) for x in a]
    want = {
        "sampling_logp_difference": mean([abs(x) for x in a]),
        "sampling_logp_difference_max": max(abs(x) for x in a),
        "gen_kl_error": mean([math.exp(x) - 1 - x for x in a]),
        "policy_kl_error": mean([math.exp(-x) - 1 + x for x in a]),
        "token_mult_prob_error": mean([math.exp(abs(x)) for x in a]),
        "chi2_token": mean([x * x for x in w]) - 1,
        "rollout_is_eff_sample_size": sum(w) ** 2 / (len(w) * math.fsum(x * x for x in w)),
        "rollout_is_ratio_fraction_high": mean([float(x > 2) for x in w]),
        "rollout_is_ratio_fraction_low": mean([float(x < 0.5) for x in w]),
        "training_log_ppl": -mean([prev for _, prev, _, _ in each]),
        "rollout_log_ppl": -mean([gen for _, _, gen, _ in each]),
        "log_ppl_diff": -mean(a),
        "approx_kl": mean([prev - now for now, prev, _, _ in each]),
        "probs_ratio": mean([math.exp(now - prev) for now, prev, _, _ in each]),
    }
    assert set(want) >= AGAINST_SAMPLER and 0 < want["rollout_is_eff_sample_size"] < 1
    assert want["rollout_is_ratio_fraction_high"] > 0 < want["rollout_is_ratio_fraction_low"]
    assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-12)


def test_without_the_samplers_log_probs_they_are_left_out() -> None:
    logits, data = random_batch(3)
    with_field = metrics_of({}, logits, data)
    del data["generation_logprobs"]
    found = metrics_of({}, logits, data)
    assert set(with_field) - set(found) == AGAINST_SAMPLER
    assert all(found[name] == with_field[name] for name in found)
    assert set(metrics_of({"surrogate": "reinforce"}, logits, data)) == {
        "loss",
        "policy_loss",
        "entropy",
        "num_valid_samples",
    }


def test_where_both_agree_every_distance_is_none() -> None:
    logits, data = random_batch(3)
    data["generation_logprobs"] = data["prev_logprobs"].clone()
    found = metrics_of({}, logits, data)
    for name in AGAINST_SAMPLER - {"training_log_ppl", "rollout_log_ppl"}:
        assert found[name] == (1.0 if name in ("token_mult_prob_error", "rollout_is_eff_sample_size") else 0.0), name


def test_one_outlier_lowers_the_effective_sample_size() -> None:
    """To the share of one token, at a ratio that float32 holds; beyond it the numbers stay finite."""
    logits, data = random_batch(3)
    valid = dense_valid(data)
    data["generation_logprobs"] = data["prev_logprobs"].clone()
    place = tuple(valid.nonzero()[4].tolist())
    for gap in (18.0, 1e4):
        data["generation_logprobs"][place] = data["prev_logprobs"][place] - gap
        found = metrics_of(
            {}, logits.detach().float(), {n: x.float() if x.is_floating_point() else x for n, x in data.items()}
        )
        assert found["rollout_is_eff_sample_size"] == pytest.approx(1 / int(valid.sum()), rel=1e-3)
        assert all(math.isfinite(found[name]) for name in AGAINST_SAMPLER)


Bounds = tuple[float, float]
CLIPS: list[tuple[dict[str, Any], str, Bounds]] = [
    ({}, "by sign", (0.8, 1.2)),
    ({"surrogate": {"name": "ppo", "clip_high": 0.28, "dual_clip": 1.5}}, "by sign", (0.8, 1.28)),
    ({"surrogate": {"name": "cispo", "clip_low": 0.3}}, "both", (0.7, 1.28)),
    ({"surrogate": {"name": "sppo", "epsilon": 0.25}}, "both", (0.8, 1.25)),
    ({"surrogate": {"name": "gmpo", "clip_low": 0.2, "clip_high": 0.3}}, "by sign", (math.exp(-0.2), math.exp(0.3))),
    ({"surrogate": "cpgd"}, "by sign", (0.8, 1.2)),
    ({"surrogate": {"name": "clip_cov", "low": 40.0, "high": 50.0}}, "by sign", (0.8, 1.2)),
    ({"surrogate": {"name": "rec", "clip_mode": "one-side"}}, "by sign", (0.8, 1.2)),
    ({"surrogate": {"name": "rec", "clip_mode": "two-side"}}, "both", (0.8, 1.2)),
]


@pytest.mark.parametrize(("config", "rule", "bounds"), CLIPS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_clip_fractions(config: dict[str, Any], rule: str, bounds: Bounds) -> None:
    logits, data = random_batch(3)
    found = metrics_of(config, logits, data, THIRDS)
    each = [(math.exp(now - prev), a) for now, prev, _, a in tokens(logits, data)]
    low, high = [r < bounds[0] for r, _ in each], [r > bounds[1] for r, _ in each]
    driven = [(r < bounds[0] and a < 0) or (r > bounds[1] and a > 0) for r, a in each]
    both = [x or y for x, y in zip(low, high, strict=True)]
    want = {
        "clip_fraction_low": mean([float(x) for x in low]),
        "clip_fraction_high": mean([float(x) for x in high]),
        "pg_clipfrac": mean([float(x) for x in (driven if rule == "by sign" else both)]),
    }
    assert want["pg_clipfrac"] > 0 and want["clip_fraction_low"] > 0 < want["clip_fraction_high"]
    assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-12)
    surrogate = config.get("surrogate", {})
    if "dual_clip" in surrogate:
        dual = mean([float(r > 1.5 and a < 0) for r, a in each])
        assert found["pg_clipfrac_lower"] == pytest.approx(dual) and dual > 0
    else:
        assert "pg_clipfrac_lower" not in found


def test_clip_fractions_of_dppo_are_its_masks() -> None:
    logits, data = random_batch(3)
    found = metrics_of(
        {"surrogate": {"name": "dppo", "low": 0.03, "high": 0.05, "ratio_max": 1.3}}, logits, data, THIRDS
    )
    each = [(math.exp(now) - math.exp(prev), math.exp(now - prev), a) for now, prev, _, a in tokens(logits, data)]
    masked = [(d > 0.05 and a > 0) or (d < -0.03 and a < 0) for d, _, a in each]
    assert found["pg_clipfrac"] == pytest.approx(mean([float(x) for x in masked]))
    assert found["clip_fraction_low"] == pytest.approx(mean([float(d < -0.03) for d, _, _ in each]))
    assert found["clip_fraction_high"] == pytest.approx(mean([float(d > 0.05) for d, _, _ in each]))
    capped = [r > 1.3 and not gone for (_, r, _), gone in zip(each, masked, strict=True)]
    assert found["pg_clipfrac_lower"] == pytest.approx(mean([float(x) for x in capped])) and any(capped)


@pytest.mark.parametrize("name", ["reinforce", "ratio", "sapo", "topr", "opmd", "vespo", "kl_cov", "rec"])
def test_a_surrogate_without_a_clip_reports_none(name: str) -> None:
    logits, data = random_batch(3)
    assert not {key for key in metrics_of({"surrogate": name}, logits, data) if "clip" in key}


def test_gspo_clips_whole_sequences() -> None:
    logits, data = random_batch(3)
    found = metrics_of(
        {"ratio_level": "sequence-mean", "surrogate": {"name": "ppo", "clip_low": 0.05, "clip_high": 0.03}},
        logits,
        data,
    )
    logp, valid = dense_logprobs(logits, data["input_ids"]).detach(), dense_valid(data)
    log_ratio = torch.where(valid, logp - data["prev_logprobs"], 0).sum(1) / valid.sum(1).clamp(min=1)
    above = (log_ratio.exp() > 1.03)[:, None] & valid
    assert found["clip_fraction_high"] == pytest.approx(above.sum().item() / valid.sum().item()) and above.any()


def test_every_metric_is_explained() -> None:
    """Of both losses, with every option that adds one; and nothing is explained that no loss logs."""
    logits, data = random_batch(3)
    rule = {"statistic": "k1", "low": 0.5, "high": 2.0}
    configs: list[dict[str, Any]] = [
        {
            "surrogate": {"name": "ppo", "dual_clip": 3.0},
            "importance": {"mode": "tis", "high": 2.0},
            "rejection": {"rules": [rule]},
        },
        {"off_policy_mask": {"delta": 0.1}, "kl": {"coefficient": 0.1}, "positive_nll_weight": 0.1},
        {"entropy_bonus": {"name": "adaptive", "target": 1.0}},
    ]
    found = {name for config in configs for name in metrics_of(config, logits, data)}
    clipped = ClippedPGLossFn({}, top_p=0.9)(logits, data, *count_valid(data))[1]
    found |= set(clipped)
    plain = {name.removesuffix("_min").removesuffix("_max") for name in found}
    assert plain == set(DESCRIPTIONS)


def test_they_print() -> None:
    logits, data = random_batch(3)
    _, metrics = PolicyLossFn({})(logits, data, *count_valid(data))
    text = repr(metrics)
    for name in (*AGAINST_SAMPLER, "pg_clipfrac", "clip_fraction_low"):
        assert f"{name}: " in text
    assert "rollout_is_eff_sample_size: square-ratio 0." in text


def test_they_are_the_same_from_hidden_states_and_cost_the_objective_nothing() -> None:
    """A head that takes gradients chunk by chunk asks for the loss alone."""
    _, data = random_batch(3)
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, 12, 5, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 5, generator=g, dtype=torch.float64, requires_grad=True)
    loss_fn, counts = PolicyLossFn({}), count_valid(data)
    whole, of_logits = loss_fn(hidden @ weight.T, data, *counts)
    asked = []
    loss_fn._diagnostics = lambda *of, inner=loss_fn._diagnostics: asked.append(1) or inner(*of)  # type: ignore[method-assign, misc, func-returns-value]
    loss, metrics = loss_fn(LMHeadInput(hidden, weight, mode="in_forward", budget=1 << 12), data, *counts)
    assert len(asked) == 1
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
    assert {name: x.item() for name, x in metrics.items()} == pytest.approx(
        {name: x.item() for name, x in of_logits.items()}, rel=1e-10
    )
