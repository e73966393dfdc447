"""The policy loss: every surrogate against a second expression, and masks over the whole step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_rl import count_valid, register_objective
from parallel_rl.losses.core.batch import TokenBatch
from tests.losses import test_user_objectives as twin
from tests.losses.policy_batches import DUAL, GSPO, SEQ, TOKEN, B, dense_logprobs, dense_valid, random_batch, rec, run

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
