"""The policy loss at its edges: options that do not do, what is read, what is rejected, and numbers beyond measure."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from parallel_rl import PolicyLossFn, Statistics, count_valid, get_loss, reduce_metrics
from parallel_rl.losses import ImportanceConfig, PolicyLossConfig
from parallel_rl.testing.batches import make_batch
from tests.losses.policy_batches import SEQ, B, dense_logprobs, dense_valid, random_batch, rec, run


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"surrogate": "pppo"}, "did you mean 'ppo'"),
        ({"surrogate": {"name": "ppo", "clip_hi": 1}}, "clip_high"),
        ({"surrogate": {"clip_low": 0.1}}, "'name'"),
        ({"surrogate": {"name": "ppo", "dual_clip": 0.5}}, "dual_clip = 0.5 must exceed 1"),
        ({"surrogate": {"name": "cpgd", "clip_low": 1.0}}, "clip_low = 1.0 must be at least 0 and below 1"),
        ({"surrogate": {"name": "sapo", "tau_neg": 0.5}}, "tau_neg = 0.5 must be at least tau_pos = 1.0"),
        ({"surrogate": "opmd", "ratio_level": "sequence-mean"}, "no effect with the surrogate 'opmd'"),
        ({"surrogate": "gmpo", "ratio_level": "sequence-mean"}, "no effect with the surrogate 'gmpo'"),
        ({"ratio_gradient": "token"}, "no effect with ratio_level = 'token'"),
        ({"surrogate": "reinforce", "log_ratio_clamp": 20.0}, "log_ratio_clamp = 20.0 has no effect"),
        ({"on_policy": True, "log_ratio_clamp": 20.0}, "log_ratio_clamp = 20.0 has no effect with on_policy"),
        ({"aggregation": "constant-length"}, "max_length"),
        ({"aggregation": "mean"}, "token-mean"),
        ({"kl": {"coefficient": 0.0}}, "kl: coefficient = 0.0 must be positive"),
        ({"kl": {"coefficient": 1.0, "weight_clamp": 2.0}}, "weight_clamp = 2.0 has no effect"),
        ({"kl": {"coefficient": 1.0, "estimator": "low_var_kl", "output_clamp": 2.0}}, "own clamps"),
        ({"importance": {"mode": "tis"}}, "give both or none"),
        ({"importance": {"high": 2.0}}, "give both or none"),
        ({"importance": {"mode": "tis", "low": 3.0, "high": 2.0}}, "0 ≤ low ≤ high"),
        ({"importance": {"mode": "seq-mask-tis", "high": 2.0, "level": "sequence-sum"}}, "keeps token weights"),
        ({"rejection": {"rules": []}}, "rules is empty"),
        ({"rejection": {"rules": [{"statistic": "k2", "low": 0.1, "high": 1.0}]}}, "never negative"),
        ({"entropy_filter": 1.0}, r"entropy_filter = 1.0 must lie in \(0, 1\)"),
        (rec("none", regularizer="k2"), "give both or none"),
    ],
)
def test_options_that_do_not_do(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLossFn(config)


def test_only_what_is_read_must_be_there() -> None:
    assert PolicyLossFn({"surrogate": "reinforce"}).requirements.names == ("advantages",)
    assert PolicyLossFn({"on_policy": True}).requirements.names == ("advantages",)
    assert "generation_logprobs" in PolicyLossFn({"importance": {}}).requirements.names
    logits, data = random_batch()
    del data["reference_policy_logprobs"]
    with pytest.raises(ValueError, match="data lacks the field 'reference_policy_logprobs'"):
        run({"kl": {"coefficient": 0.1}}, logits, data)


def test_what_is_rejected_carries_no_kl_and_no_entropy() -> None:
    """In a mean over sequences, where one is rejected as a whole."""
    logits, data = random_batch(3)
    rule = {"statistic": "k1", "low": 0.9, "high": 1.1, "level": "sequence-mean"}
    data["advantages"] = torch.zeros_like(data["advantages"])
    config = {
        "surrogate": "reinforce",
        "aggregation": SEQ,
        "kl": {"coefficient": 1.0, "estimator": "k2", "gradient": "plain"},
        "entropy_bonus": 0.5,
        "rejection": {"rules": [rule], "denominator": "kept"},
    }
    loss = run(config, logits, data)
    logp, valid = dense_logprobs(logits, data["input_ids"]), dense_valid(data)
    logs = logits.log_softmax(-1)
    entropy = torch.cat([torch.zeros(B, 1).double(), -(logs.exp() * logs).sum(-1)[:, :-1]], 1)
    x = (logp - data["reference_policy_logprobs"]).square() / 2 - 0.5 * entropy
    means = []
    for i in range(B):
        if valid[i].any():
            a = (data["prev_logprobs"] - data["generation_logprobs"])[i][valid[i]].mean()
            if math.log(0.9) <= a <= math.log(1.1):
                means.append(x[i][valid[i]].mean())
    assert 0 < len(means) < int(valid.any(1).sum())
    torch.testing.assert_close(loss, torch.stack(means).mean(), rtol=1e-12, atol=0)


def test_a_drift_beyond_all_measure_stays_finite() -> None:
    logits, data = random_batch(6)
    data["prev_logprobs"] = data["prev_logprobs"] - 1e3
    for name in ("gmpo", "ppo", "vespo", "sapo", "topr", "kl_cov"):
        leaf = logits.detach().float().requires_grad_()
        loss = run({"surrogate": name}, leaf, data)
        loss.backward()
        assert bool(loss.isfinite()), name
        assert leaf.grad is not None and bool(leaf.grad.isfinite().all()), name


def test_equal_advantages_are_not_penalised() -> None:
    logits, data = random_batch(6)
    data["advantages"] = torch.zeros_like(data["advantages"])
    assert run({"surrogate": "kl_cov"}, logits, data).item() == 0
    for advantage in (0.1, 0.7):  # whose mean is not it, to the last bit
        data["advantages"] = torch.full_like(data["advantages"], advantage)
        found = [run({"surrogate": name}, logits, data) for name in ("kl_cov", "ratio")]
        assert torch.equal(*found), advantage


def test_a_weight_that_float32_cannot_hold_is_truncated() -> None:
    logits, data = random_batch(6)
    data["generation_logprobs"] = data["prev_logprobs"] - 93.0
    for dtype in (torch.float64, torch.float32):
        leaf = logits.detach().to(dtype)
        loss_fn, counts = PolicyLossFn({"importance": {"mode": "tis", "high": 2.0}}), count_valid(data)
        _, metrics = loss_fn(leaf, data, *counts)
        assert metrics["sampling_importance_ratio"].item() == pytest.approx(2.0)


def test_statistics_of_another_loss_are_refused() -> None:
    logits, data = random_batch()
    loss_fn, counts = PolicyLossFn({"positive_nll_weight": 0.1}), count_valid(data)
    with pytest.raises(ValueError, match="statistics hold \\[\\], not 'positive_tokens'"):
        loss_fn(logits, data, *counts, statistics=Statistics({}))
    with pytest.raises(ValueError, match="statistics must be a Statistics"):
        loss_fn(logits, data, *counts, statistics={"a": 1})  # type: ignore[arg-type]


def test_a_config_instance_takes_mappings_inside() -> None:
    loss_fn = PolicyLossFn(PolicyLossConfig(importance={"mode": "tis", "high": 2.0}))  # type: ignore[arg-type]
    assert loss_fn.config.importance == ImportanceConfig(mode="tis", high=2.0)


def test_log_probs_of_the_sampler_are_asked_for_where_the_loss_reads_them() -> None:
    """They were demanded of everyone, for metrics alone; without them the loss is the same, and those metrics are not there."""
    batch = make_batch(2, False, "clipped_pg", torch.float64)
    data = {name: field for name, field in batch.data.items() if name != "generation_logprobs"}
    loss_fn, counts, found = get_loss("clipped_pg")({}), count_valid(data), []
    for given in (batch.data, data):
        logits = batch.logits.detach().clone().requires_grad_()
        loss, metrics = loss_fn(logits, given, *counts)
        loss.backward()
        found.append((loss.detach(), logits.grad, reduce_metrics([metrics])))
    (loss, gradient, metrics), (same_loss, same_gradient, fewer) = found
    assert torch.equal(loss, same_loss) and torch.equal(gradient, same_gradient)
    assert sorted(set(metrics) - set(fewer)) == [
        "approx_entropy", "gen_kl_error", "js_divergence_error", "policy_kl_error", "sampling_importance_ratio",
        "token_mult_prob_error",
    ]  # fmt: skip
    assert all(torch.equal(value, metrics[name]) for name, value in fewer.items())
    with pytest.raises(ValueError, match=r"generation_logprobs has shape \[12\]"):  # given, it is checked
        loss_fn(batch.logits, {**data, "generation_logprobs": torch.zeros(12)}, *counts)
    assert (
        "reference_policy_logprobs" not in get_loss("clipped_pg")({"reference_policy_kl_penalty": 0}).requirements.names
    )


@pytest.mark.parametrize("config", [{"positive_nll_weight": 0.2}, {"aggregation": "prompt-mean"}], ids=str)
@pytest.mark.parametrize("surrogate", ["reinforce", "opmd"])
def test_a_loss_without_a_ratio_counts_without_the_policy(surrogate: str, config: dict[str, Any]) -> None:
    """It compares with no earlier policy, and there is no present one where the data alone is counted."""
    logits, data = random_batch()
    data["group_ids"] = torch.tensor([4, 4, 4, 7, 7, 9, 9])
    loss_fn = PolicyLossFn({"surrogate": surrogate, **config})
    counted = loss_fn.count(data)
    loss, _ = loss_fn(logits, data, *count_valid(data), statistics=counted)
    assert bool(loss.isfinite()) and not loss_fn.needs_collect
    if "positive_nll_weight" in config:
        positive = (dense_valid(data) & (data["rewards"] > 0)[:, None]).sum()
        assert counted["positive_tokens"].item() == positive.item() > 0
