"""The policy loss: golden rows by option, every surrogate against a second expression, and masks over the whole step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import PolicyLossFn, Statistics, count_valid, get_loss, reduce_metrics, register_objective
from parallel_rl.losses import ImportanceConfig, PolicyLossConfig
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.testing.batches import make_batch
from parallel_rl.testing.cases import step_statistics
from tests.losses import test_user_objectives as twin
from tests.losses.test_golden import coefficients, make

TOKEN, SEQ, SUM = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
DUAL = {"name": "ppo", "dual_clip": 3.0}
GSPO = {"ratio_level": "sequence-mean", "ratio_gradient": "token"}
WIDE = {"name": "ppo", "clip_low": 3e-4, "clip_high": 4e-4}
NOTHING = {"surrogate": "reinforce"}  # with advantages 0, for the rows of the KL alone


def rec(mode: str, **options: object) -> dict[str, Any]:
    return {"surrogate": {"name": "rec", "clip_mode": mode, **options}}


def kl(estimator: str, gradient: str = "plain", **options: object) -> dict[str, Any]:
    return {**NOTHING, "kl": {"coefficient": 1.0, "estimator": estimator, "gradient": gradient, **options}}


def seq(**options: object) -> dict[str, Any]:
    return {"aggregation": SEQ, **options}


Row = tuple[str, "dict[str, Any]", float, "tuple[float, float, float] | None"]
ROWS: list[Row] = [
    ("ppo", {}, 1.430469, (0.0, 0.074992, 1.344366)),
    ("ppo seq", seq(), 2.155992, None),
    ("ppo sum", {"aggregation": SUM}, 4.291408, None),
    ("ppo length", {"aggregation": "constant-length", "max_length": 4}, 3.218556 / 3, None),
    ("dual", {"surrogate": DUAL}, 0.75277, (0.0, 0.074992, 0.0)),
    ("dual seq", seq(surrogate=DUAL), 1.139443, None),
    ("clip higher", {"surrogate": {**DUAL, "clip_high": 0.28}}, 0.741503, None),
    ("off-policy mask", {"surrogate": DUAL, "off_policy_mask": {"delta": -1.0}}, -0.367204, None),
    ("cpgd", seq(surrogate="cpgd"), 0.046984, (0.0, 0.041667, 0.333333)),
    ("gspo", seq(surrogate=WIDE, **GSPO), 1.477155, None),
    ("gspo token", {"surrogate": WIDE, **GSPO}, 0.987538, None),
    ("gspo full", seq(ratio_level="sequence-mean"), math.nan, (0.0, 0.042721, 0.819868)),
    ("gspo token gradient", seq(**GSPO), math.nan, (0.0, 0.042721, 0.819868)),
    ("cispo", {"surrogate": "cispo"}, 0.108691, (-0.135711, 0.071111, 0.284444)),
    ("cispo mask", {"surrogate": {"name": "cispo", "mask_low": 1.0, "mask_high": 0.28}}, -0.175754, None),
    ("topr", {"surrogate": "topr"}, 0.072742, (-0.111111, 0.055556, 0.222222)),
    ("topr sequence", {"surrogate": "topr", "ratio_level": "sequence-sum"}, 0.061111, None),
    ("sppo", {"surrogate": "sppo"}, -0.022222, None),
    ("sapo", seq(surrogate="sapo"), 1.472165, (-0.134062, 0.054388, 0.039780)),
    ("sapo detached", {"surrogate": "sapo_detached"}, 0.134576, (-0.246723, 0.125041, 0.842365)),
    ("opmd", {"surrogate": "opmd"}, 0.030556, None),
    ("importance sampling", {"surrogate": "ratio", "log_ratio_clamp": 20.0}, 1.378233, None),
    ("rec one side", rec("one-side", weight="importance_sampling"), -0.668354, None),
    ("rec two side", rec("two-side"), -0.116667, None),
    ("rec ring", rec("ring"), -0.205556, None),
    ("rec gspo", seq(**rec("gspo-one-side", weight="gspo_importance_sampling")), -0.771242, None),
    ("rec k2", rec("none", regularizer="k2", regularizer_coef=0.1), 0.101667, None),
    ("rec forward", rec("none", regularizer="forward-kl", regularizer_coef=0.1), 0.138889, None),
    ("rec advantage", rec("none", weight="advantage"), 0.94207, None),
    ("gmpo", seq(surrogate="gmpo"), 1.416834, (-0.131262, 0.042721, 0.819868)),
    ("gpg", {"surrogate": "reinforce"}, 0.061111, None),
    ("k1", kl("k1"), 0.2, (0.111111, 0.111111, 0.111111)),
    ("k2", kl("k2"), 0.086667, (0.011111, -0.011111, 0.122222)),
    ("k3", kl("k3"), 0.066218, (0.010574, -0.011686, 0.074125)),
    ("low variance", kl("low_var_kl"), 0.066218, (0.010574, -0.011686, 0.074125)),
    ("abs", kl("abs"), 0.288889, None),
    ("k3 score function", kl("k3", "score-function"), 0.066218, (0.011111, -0.011111, 0.122222)),
    ("k3 straight through", kl("k3", "straight-through"), 0.066218, (0.011111, -0.011111, 0.122222)),
    ("corrected k3", kl("k3", "old", weight_clamp=2.0), 0.115038, (0.013571, -0.014998, 0.148251)),
    ("is", {"importance": {}}, 2.814071, None),
    ("tis", {"importance": {"mode": "tis", "high": 2.0}}, 2.795582, None),
    ("icepop", {"importance": {"mode": "icepop", "low": 0.5, "high": 5.0}}, 2.814071, None),
    ("seq-mask-tis", {"importance": {"mode": "seq-mask-tis", "low": 0.98, "high": 1.2}}, 0.238557, None),
]


def run(config: dict, logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    loss_fn, counts = PolicyLossFn(config), count_valid(data)
    statistics = step_statistics([(loss_fn, (logits, data, *counts))])
    loss, metrics = loss_fn(logits, data, *counts, statistics=statistics)
    assert metrics["loss"].item() == loss.item()
    return loss


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_golden_row(row: Row) -> None:
    _, config, value, gradient = row
    logits, data = make()
    if "kl" in config:
        data["advantages"] = torch.zeros_like(data["advantages"])
    loss = run(config, logits, data)
    loss.backward()
    if not math.isnan(value):
        assert loss.item() == pytest.approx(value, abs=1e-6)
    if gradient is not None:
        assert logits.grad is not None
        assert coefficients(logits.grad) == pytest.approx(gradient, abs=1e-6)


B, S, V = 7, 12, 9


def random_batch(seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Ragged rows with holes, one row without tokens, advantages that vary in a sequence."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, S, V, generator=g, dtype=torch.float64)
    ids = torch.randint(0, V, (B, S), generator=g)
    mask = (torch.rand(B, S, generator=g) < 0.7).long()
    mask[2] = 0
    logp = dense_logprobs(logits, ids)
    near = [logp + scale * torch.randn(B, S, generator=g).double() for scale in (0.4, 0.5, 0.3)]
    names = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    return logits.requires_grad_(), {
        "input_ids": ids,
        "token_mask": mask,
        "sample_mask": torch.tensor([1, 1, 1, 1, 0, 1, 1]),
        "sample_ids": torch.randperm(100, generator=g)[:B],
        "advantages": torch.randn(B, S, generator=g).double(),
        "rewards": torch.randn(B, generator=g).double(),
        **dict(zip(names, near, strict=True)),
    }


def dense_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Token-aligned [B, S], column 0 is 0."""
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(B, 1).double(), logp], 1)


def dense_valid(data: dict[str, Tensor]) -> Tensor:
    mask = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    return torch.cat([torch.zeros(B, 1, dtype=torch.bool), mask[:, 1:]], 1)


TWINS = [
    ("ppo", {}, twin.ppo),
    ("dual", {"surrogate": DUAL}, twin.dual),
    ("cpgd", {"surrogate": "cpgd"}, twin.cpgd),
    ("gspo", GSPO, lambda lp, b: twin.gspo_token(lp, b, 0.2, 0.2)),
    ("cispo", {"surrogate": {"name": "cispo", "mask_low": 1.0, "mask_high": 0.28}}, twin.cispo_mask),
    ("topr", {"surrogate": "topr"}, twin.topr),
    ("sppo", {"surrogate": "sppo"}, twin.sppo),
    ("sapo", {"surrogate": "sapo"}, twin.sapo),
    ("sapo_detached", {"surrogate": "sapo_detached"}, twin.sapo_trinity),
    ("rec ring", rec("ring"), lambda lp, b: twin.rec(lp, b, "ring")),
    ("rec one", rec("one-side", weight="importance_sampling"), lambda lp, b: twin.rec(lp, b, "one", weighted=True)),
    ("gmpo", {"surrogate": "gmpo"}, twin.gmpo),
]


@pytest.mark.parametrize("case", TWINS, ids=lambda case: case[0])
def test_a_surrogate_equals_its_second_expression(case: tuple) -> None:
    name, config, objective = case

    def named(logprobs: Tensor, batch: TokenBatch) -> Tensor:
        return objective(logprobs, batch)

    def of_policy(aggregation: str, logits: Tensor, data: dict[str, Tensor]) -> Tensor:
        return run({**config, "aggregation": aggregation}, logits, data)

    twin_class = register_objective(f"doc_twin_{name}", token_fields=twin.FIELDS)(named)

    def of_twin(aggregation: str, logits: Tensor, data: dict[str, Tensor]) -> Tensor:
        return twin_class({"aggregation": aggregation})(logits, data, *count_valid(data))[0]

    for aggregation in (TOKEN, SEQ):
        found = []
        for loss_of in (of_policy, of_twin):
            logits, data = random_batch()
            loss = loss_of(aggregation, logits, data)
            loss.backward()
            found.append((loss.detach(), logits.grad))
        torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def test_vespo_equals_its_formula() -> None:
    logits, data = random_batch()
    loss = run({"surrogate": "vespo"}, logits, data)
    logp, valid = dense_logprobs(logits, data["input_ids"]), dense_valid(data)
    log_w = torch.where(valid, logp - data["prev_logprobs"], 0).sum(1).detach()
    total = torch.zeros(()).double()
    for i, t in valid.nonzero().tolist():
        k, scale = (2.0, 3.0) if data["advantages"][i, t] >= 0 else (3.0, 2.0)
        phi = math.exp(scale) * log_w[i].exp() ** k * math.exp(-scale * log_w[i].exp())
        total = total - phi * data["advantages"][i, t] * logp[i, t]
    torch.testing.assert_close(loss, total / valid.sum(), rtol=1e-12, atol=0)


def covariances(logp: Tensor, data: dict[str, Tensor], valid: Tensor) -> Tensor:
    a, x = data["advantages"], logp.detach()
    return (a - a[valid].mean()) * (x - x[valid].mean())


def test_kl_cov_penalises_the_largest_covariances() -> None:
    logits, data = random_batch(1)
    loss = run({"surrogate": {"name": "kl_cov", "fraction": 0.2, "coefficient": 0.7}}, logits, data)
    logp, valid = dense_logprobs(logits, data["input_ids"]), dense_valid(data)
    cov, n = covariances(logp, data, valid), int(valid.sum())
    top = torch.zeros_like(valid)
    order = sorted(valid.nonzero().tolist(), key=lambda at: -cov[at[0], at[1]])
    for i, t in order[: int(0.2 * n)]:
        top[i, t] = True
    log_ratio = logp - data["prev_logprobs"]
    x = -data["advantages"] * log_ratio.exp() + 0.7 * top.double() * log_ratio.abs()
    torch.testing.assert_close(loss, x[valid].sum() / n, rtol=1e-12, atol=0)


def clip_cov(seed: int, logits: Tensor, data: dict[str, Tensor]) -> tuple[float, Tensor]:
    surrogate = {"name": "clip_cov", "fraction": 0.1, "low": 0.1, "high": 5.0, "seed": seed}
    logits = logits.detach().requires_grad_()
    loss = run({"surrogate": surrogate}, logits, data)
    loss.backward()
    assert logits.grad is not None
    return loss.item(), logits.grad


def test_clip_cov_drops_a_keyed_draw_of_the_eligible() -> None:
    logits, data = random_batch(1)
    logp, valid = dense_logprobs(logits, data["input_ids"]), dense_valid(data)
    cov, ratio, a = covariances(logp, data, valid), (logp - data["prev_logprobs"]).exp(), data["advantages"]
    clipped = ((ratio > 1.2) & (a > 0)) | ((ratio < 0.8) & (a < 0))
    eligible = valid & (cov > 0.1) & (cov < 5.0) & ~clipped
    per_token = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    n, k = int(valid.sum()), int(0.1 * int(valid.sum()))
    assert int(eligible.sum()) > k > 1
    plain = per_token[valid].sum() / n
    draws = set()
    for seed in range(5):
        loss, gradient = clip_cov(seed, logits, data)
        dropped = eligible[:, 1:] & (gradient[:, :-1] == 0).all(-1)
        assert int(dropped.sum()) == k
        without = plain - per_token[:, 1:][dropped].sum() / n
        assert loss == pytest.approx(without.item(), rel=1e-12)
        draws.add(tuple(map(tuple, dropped.nonzero().tolist())))
        order = torch.tensor([6, 3, 0, 5, 2, 4, 1])  # the draw follows the sample, not its row
        moved, gradient_moved = clip_cov(seed, logits[order], {name: value[order] for name, value in data.items()})
        assert moved == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(gradient_moved, gradient[order], rtol=1e-10, atol=1e-14)
    assert len(draws) > 1


def test_entropy_filter_keeps_the_top_of_the_step() -> None:
    logits, data = random_batch(2)
    loss = run({"surrogate": "reinforce", "entropy_filter": 0.3}, logits, data)
    logp, valid = dense_logprobs(logits, data["input_ids"]), dense_valid(data)
    logs = logits.log_softmax(-1)
    entropy = torch.cat([torch.zeros(B, 1).double(), -(logs.exp() * logs).sum(-1)[:, :-1]], 1)
    bound = torch.quantile(entropy[valid], 0.7)
    kept = valid & (entropy >= bound)
    assert 0 < int(kept.sum()) < int(valid.sum())
    expected = -(data["advantages"] * logp)[kept].sum() / valid.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


REJECTIONS = [
    ({"statistic": "k1", "low": 0.8, "high": 1.3}, lambda a, of: a),
    ({"statistic": "k2", "high": 0.05}, lambda a, of: a.square() / 2),
    ({"statistic": "k3", "high": 0.5, "level": "sequence-sum"}, lambda a, of: of(a.exp() - 1 - a).sum()),
    ({"statistic": "k1", "low": 0.9, "high": 1.1, "level": "sequence-mean"}, lambda a, of: of(a).mean()),
    ({"statistic": "k3", "high": 0.6, "level": "sequence-max"}, lambda a, of: of(a.exp() - 1 - a).max()),
]


@pytest.mark.parametrize("denominator", ["original", "kept"])
@pytest.mark.parametrize("index", range(len(REJECTIONS)))
def test_rejection(index: int, denominator: str) -> None:
    rule, statistic = REJECTIONS[index]
    logits, data = random_batch(3)
    for aggregation in (TOKEN, SEQ):
        rejection = {"rules": [rule], "denominator": denominator}
        loss = run({"surrogate": "reinforce", "rejection": rejection, "aggregation": aggregation}, logits, data)
        logp, valid = dense_logprobs(logits, data["input_ids"]), dense_valid(data)
        low, high = rule.get("low", 0.0), rule["high"]
        if rule["statistic"] == "k1":
            low, high = (math.log(low), math.log(high))
        kept = valid.clone()
        for i in range(B):
            if not valid[i].any():
                continue
            a = (data["prev_logprobs"] - data["generation_logprobs"])[i]
            value = statistic(a, lambda x, row=valid[i]: x[row])
            kept[i] &= (value >= low) & (value <= high)
        assert 0 < int(kept.sum()) < int(valid.sum())
        counted = kept if denominator == "kept" else valid
        x = torch.where(kept, -data["advantages"] * logp, 0).sum(1)
        if aggregation == TOKEN:
            expected = x.sum() / counted.sum()
        else:
            n_seqs = (kept.any(1)).sum() if denominator == "kept" else data["sample_mask"].sum()
            expected = (x / counted.sum(1).clamp(min=1)).sum() / n_seqs
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_importance_weights_divided_by_their_mean() -> None:
    logits, data = random_batch(4)
    plain = run({"importance": {"mode": "tis", "high": 1.5}}, logits, data)
    normal = run({"importance": {"mode": "tis", "high": 1.5, "normalize": True}}, logits, data)
    valid = dense_valid(data)
    weight = (data["prev_logprobs"] - data["generation_logprobs"]).exp().clamp(max=1.5)
    torch.testing.assert_close(normal, plain / weight[valid].mean(), rtol=1e-12, atol=0)


def test_entropy_bonus_has_a_gradient() -> None:
    logits, data = random_batch(5)
    data["advantages"] = torch.zeros_like(data["advantages"])
    loss = run({"surrogate": "reinforce", "entropy_bonus": 0.3}, logits, data)
    loss.backward()
    other = logits.detach().clone().requires_grad_()
    logs, valid = other.log_softmax(-1), dense_valid(data)
    expected = 0.3 * (logs.exp() * logs).sum(-1)[:, :-1][valid[:, 1:]].sum() / valid.sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-10, atol=1e-14)


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
