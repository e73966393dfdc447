"""Rejection by probabilities, by the sign of the advantage and over the whole step (M2PO), in Python's floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import ClippedPGLossFn, PolicyLossFn, Statistics, count_valid
from parallel_rl.functional.importance import step_bound
from tests.losses.policy_batches import V
from tests.losses.test_policy import B, dense_logprobs, dense_valid, random_batch

Data = dict[str, Tensor]
TOKEN_MEAN, SEQ = "token-mean", "seq-mean-token-mean"


def run(rejection: dict[str, Any], logits: Tensor, data: Data, **options: Any) -> tuple[Tensor, float]:
    """The loss of REINFORCE under this rejection, in one call, and the share that is rejected."""
    loss_fn, counts = PolicyLossFn({"surrogate": "reinforce", "rejection": rejection, **options}), count_valid(data)
    given = {"statistics": loss_fn.count(data)} if loss_fn.needs_statistics else {}
    if loss_fn.needs_collect:
        given["statistics"] |= loss_fn.collect(logits, data, *counts).reduce()
    loss, metrics = loss_fn(logits, data, *counts, **given)
    return loss, metrics["rejected_fraction"].item()


def value(statistic: str, prev: float, sampler: float) -> float:
    p, q, a = math.exp(prev), math.exp(sampler), prev - sampler
    return {
        "k1": a,
        "k2": a * a / 2,
        "k3": math.exp(a) - 1 - a,
        "tv": abs(p - q),
        "binary_kl": q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8)),
    }[statistic]


def pool(level: str, values: list[float]) -> list[float]:
    if level == "token":
        return values
    one = {"sum": math.fsum, "mean": lambda v: math.fsum(v) / len(v), "max": max}[level.partition("-")[2]](values)
    return [one] * len(values)


def kept(rule: dict[str, Any], data: Data) -> Tensor:
    """[B, S] bool, from the definition."""
    valid = dense_valid(data)
    keep = valid.clone()
    statistic, level = rule["statistic"], rule.get("level", "token")
    low, high = rule.get("low", 0.0), rule["high"]
    if statistic == "k1":
        low, high = math.log(low) if low else -math.inf, math.log(high)
    for i in range(B):
        places = valid[i].nonzero()[:, 0].tolist()
        if not places:
            continue
        pairs = [(data["prev_logprobs"][i, t].item(), data["generation_logprobs"][i, t].item()) for t in places]
        found = pool(level, [value(statistic, *pair) for pair in pairs])
        sides = pool(level, [p - q for p, q in pairs])
        for t, x, side in zip(places, found, sides, strict=True):
            a = data["advantages"][i, t].item()
            over, under = x > high, x < low
            if rule.get("signed"):
                symmetric = statistic != "k1"
                over = (over and a > 0 and (side > 0 or not symmetric)) or (symmetric and over and a < 0 and side < 0)
                under = under and a < 0
            keep[i, t] = not (over or under)
    return keep


RULES = [
    {"statistic": "tv", "high": 0.05},
    {"statistic": "tv", "high": 0.05, "signed": True},
    {"statistic": "tv", "high": 0.05, "level": "sequence-mean"},
    {"statistic": "tv", "high": 0.4, "level": "sequence-sum", "signed": True},
    {"statistic": "tv", "high": 0.2, "level": "sequence-max"},
    {"statistic": "binary_kl", "high": 0.01},
    {"statistic": "binary_kl", "high": 0.01, "signed": True},
    {"statistic": "binary_kl", "high": 0.015, "level": "sequence-mean"},
    {"statistic": "binary_kl", "high": 0.015, "level": "sequence-mean", "signed": True},
    {"statistic": "k1", "low": 0.9, "high": 1.1, "signed": True},
    {"statistic": "k1", "high": 1.1, "signed": True},
    {"statistic": "k1", "low": 0.97, "high": 1.02, "level": "sequence-mean", "signed": True},
    {"statistic": "k1", "low": 1.1, "high": 1.5, "level": "sequence-max", "signed": True},
    {"statistic": "k2", "high": 0.03, "signed": True},
    {"statistic": "k3", "high": 0.05, "level": "sequence-mean", "signed": True},
]


@pytest.mark.parametrize("denominator", ["original", "kept"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_a_rule_keeps_what_its_definition_says(rule: dict[str, Any], denominator: str) -> None:
    logits, data = random_batch(3)
    data["advantages"][1, ::3] = 0.0
    keep, valid = kept(rule, data), dense_valid(data)
    assert 0 < int(keep.sum()) < int(valid.sum())
    logp = dense_logprobs(logits, data["input_ids"])
    x = torch.where(keep, -data["advantages"] * logp, 0).sum(1)
    counted = keep if denominator == "kept" else valid
    number = keep.any(1).sum() if denominator == "kept" else data["sample_mask"].sum()
    for aggregation in (TOKEN_MEAN, SEQ):
        loss, rejected = run({"rules": [rule], "denominator": denominator}, logits, data, aggregation=aggregation)
        each = (x / counted.sum(1).clamp(min=1)).sum() / number
        torch.testing.assert_close(
            loss, x.sum() / counted.sum() if aggregation == TOKEN_MEAN else each, rtol=1e-12, atol=0
        )
        assert rejected == pytest.approx(1 - int(keep.sum()) / int(valid.sum()))


def leave_the_largest(values: dict[tuple[int, int], float], most: float) -> set[tuple[int, int]]:
    """The places that stay: the largest go one by one until the mean of the rest is at most `most`."""
    order = sorted(values, key=lambda at: values[at])
    while order and math.fsum(values[at] for at in order) / len(order) > most:
        order.pop()
    return set(order)


STEP_RULES = [
    {"statistic": "k2", "high": 0.03},
    {"statistic": "k2", "high": 0.03, "signed": True},
    {"statistic": "k3", "high": 0.01},
    {"statistic": "tv", "high": 0.02},
    {"statistic": "binary_kl", "high": 0.005, "signed": True},
]


@pytest.mark.parametrize("denominator", ["original", "kept"])
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("rule", STEP_RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_m2po_leaves_out_the_largest_of_the_whole_step(rule: dict[str, Any], on_policy: bool, denominator: str) -> None:
    """In three calls of one step: a micro-batch alone would leave others out."""
    logits, data = random_batch(7)
    logp, valid = dense_logprobs(logits, data["input_ids"]), dense_valid(data)
    prev = logp.detach() if on_policy else data["prev_logprobs"]
    values = {}
    for i, t in valid.nonzero().tolist():
        pair, a = (prev[i, t].item(), data["generation_logprobs"][i, t].item()), data["advantages"][i, t].item()
        if not rule.get("signed") or (pair[0] - pair[1]) * a > 0:
            values[i, t] = value(rule["statistic"], *pair)
    stay = leave_the_largest(values, rule["high"])
    assert 0 < len(stay) < len(values)
    keep = valid.clone()
    for at in set(values) - stay:
        keep[at] = False
    by_call = torch.zeros_like(valid)
    for rows in (slice(0, 2), slice(2, 5), slice(5, B)):
        here = leave_the_largest({at: x for at, x in values.items() if rows.start <= at[0] < rows.stop}, rule["high"])
        for at in here:
            by_call[at] = True
    assert any(bool(by_call[at]) != bool(keep[at]) for at in values), "a micro-batch alone would do as well"

    other = {"importance": {}} if on_policy else {}
    config = {
        "surrogate": "ratio",
        "on_policy": on_policy,
        **other,
        "rejection": {"rules": [{**rule, "level": "step"}], "denominator": denominator},
    }
    loss_fn, counts = PolicyLossFn(config), count_valid(data)
    parts = [{name: x[rows] for name, x in data.items()} for rows in (slice(0, 2), slice(2, 5), slice(5, B))]
    leaves = [logits.detach()[rows].requires_grad_() for rows in (slice(0, 2), slice(2, 5), slice(5, B))]
    statistics = loss_fn.count(parts)
    if loss_fn.needs_collect:
        collected = [loss_fn.collect(leaf, part, *counts) for leaf, part in zip(leaves, parts, strict=True)]
        statistics |= sum(collected[1:], collected[0]).reduce()
    assert loss_fn.needs_collect is on_policy  # recorded log-probs cost no forward
    losses = [loss_fn(leaf, part, *counts, statistics=statistics)[0] for leaf, part in zip(leaves, parts, strict=True)]
    loss = torch.stack(losses).sum()
    loss.backward()
    ratio = (logp - logp.detach()).exp() if on_policy else (logp - data["prev_logprobs"]).exp()
    omega = (logp.detach() - data["generation_logprobs"]).exp() if on_policy else 1.0
    want = (
        torch.where(keep, -data["advantages"] * omega * ratio, 0).sum()
        / (keep if denominator == "kept" else valid).sum()
    )
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([leaf.grad for leaf in leaves]), logits.grad, rtol=1e-10, atol=1e-14)


def test_where_every_token_leaves_the_loss_is_an_exact_zero() -> None:
    logits, data = random_batch(1)
    data["generation_logprobs"] = data["prev_logprobs"] - 1.0
    for denominator in ("original", "kept"):
        rejection = {"rules": [{"statistic": "k2", "high": 0.4, "level": "step"}], "denominator": denominator}
        leaf = logits.detach().requires_grad_()
        loss, rejected = run(rejection, leaf, data, kl={"coefficient": 0.1}, entropy_bonus=0.1)
        loss.backward()
        assert loss.item() == 0 and rejected == pytest.approx(1)
        assert leaf.grad is not None and bool((leaf.grad == 0).all())
    loss, rejected = run({"rules": [{"statistic": "k2", "high": 0.5, "level": "step"}]}, logits, data)
    assert loss.item() != 0 and rejected == pytest.approx(0, abs=1e-12)  # at the bound all stay


def test_the_bound_of_the_step() -> None:
    def bound(values: list[float], most: float) -> float:
        return step_bound(torch.tensor(values, dtype=torch.float64), most).item()

    assert step_bound(torch.empty(0), 0.1).shape == ()  # a step without a token
    assert bound([1.0, 2.0, 3.0], 2.0) == math.inf and bound([1.0, 2.0, 3.0], 0.5) == -math.inf
    assert 2.0 < bound([3.0, math.nan, 2.0, 1.0], 1.5) < 3.0
    assert bound([1.0, 2.0, 2.0], 1.5) == 2.0  # equal ones leave together: what stays is below
    assert bound([0.0, 0.0, math.inf], 0.1) == math.inf  # which is not below itself: it leaves


def test_several_rules_all_pass_and_kept_counts_their_survivors() -> None:
    logits, data = random_batch(3)
    rules: list[dict[str, Any]] = [
        {"statistic": "k2", "high": 0.05, "level": "step"},
        {"statistic": "tv", "high": 0.1},
        {"statistic": "k1", "low": 0.5, "high": 1.2, "level": "sequence-mean"},
    ]
    valid = dense_valid(data)
    places = [tuple(at) for at in valid.nonzero().tolist()]
    values = {
        at: value("k2", data["prev_logprobs"][at].item(), data["generation_logprobs"][at].item()) for at in places
    }
    stay, keep = leave_the_largest(values, 0.05), kept(rules[1], data) & kept(rules[2], data)
    for at in set(values) - stay:
        keep[at] = False
    loss, rejected = run({"rules": rules, "denominator": "kept"}, logits, data)
    logp = dense_logprobs(logits, data["input_ids"])
    want = torch.where(keep, -data["advantages"] * logp, 0).sum() / keep.sum()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    assert rejected == pytest.approx(1 - int(keep.sum()) / len(values))


def test_statistics_of_another_configuration_are_refused() -> None:
    logits, data = random_batch(3)
    loss_fn = PolicyLossFn({"rejection": {"rules": [{"statistic": "k2", "high": 0.1, "level": "step"}]}})
    with pytest.raises(ValueError, match="statistics hold the samples \\[\\], not 'rejection_0'"):
        loss_fn(logits, data, *count_valid(data), statistics=Statistics({}))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"statistic": "binary-kl", "high": 0.1}, "'tv', 'binary_kl'"),
        ({"statistic": "tv", "high": 0.0}, r"low = 0.0 and high = 0.0 must be 0 ≤ low < high"),
        ({"statistic": "tv", "high": -0.1}, "must be 0 ≤ low < high"),
        ({"statistic": "tv", "high": 1.0}, "high = 1.0 has no effect with statistic = 'tv', which is never above 1"),
        ({"statistic": "tv", "high": 1.0, "level": "step"}, "which is never above 1"),
        ({"statistic": "binary_kl", "low": 0.1, "high": 1.0}, "never negative"),
        ({"statistic": "k1", "high": 1.1, "level": "step"}, "statistic = 'k1' has either sign"),
        ({"statistic": "k2", "high": 0.1, "level": "batch"}, "'sequence-max', 'step'|'step'"),
        ({"statistic": "k2", "high": 0.1, "level": "sequence-max", "signed": True}, "the largest k2 has no sign"),
        ({"statistic": "k2", "high": 0.1, "sign": True}, "did you mean 'signed'"),
    ],
)
def test_rules_that_do_not_do(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLossFn({"rejection": {"rules": [rule]}})


def test_the_survivors_of_a_step_have_no_sequences() -> None:
    rejection = {"rules": [{"statistic": "k2", "high": 0.1, "level": "step"}], "denominator": "kept"}
    with pytest.raises(
        ValueError, match="aggregation = 'seq-mean-token-mean' is incompatible with denominator = 'kept'"
    ):
        PolicyLossFn({"aggregation": SEQ, "rejection": rejection})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_count_and_loss_look_at_the_same_recorded_numbers(dtype: torch.dtype) -> None:
    """Log-probs of one decimal lie on a bound: rounded to the logits' dtype, two more were kept than were counted."""
    g = torch.tensor([[-1.0, -0.1, -0.3, -0.7, -1.1, -1.9, -2.3, -0.5, -1.7]], dtype=torch.float64)
    data = {
        "input_ids": torch.zeros(1, 9, dtype=torch.int64),
        "token_mask": torch.ones(1, 9),
        "sample_mask": torch.ones(1),
    }
    data |= {"advantages": torch.ones_like(g), "generation_logprobs": g, "prev_logprobs": ((g - 0.2) * 10).round() / 10}
    rule = {"rules": [{"statistic": "k2", "high": 0.02}], "denominator": "kept"}
    loss, rejected = run(rule, torch.zeros(1, 9, V, dtype=dtype), data)
    assert rejected == 0.5 and loss.item() == pytest.approx(math.log(V), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence-sum"])
def test_a_weight_that_float32_cannot_hold_is_divided_by_the_mean_that_it_is_in(level: str, dtype: torch.dtype) -> None:
    """It was set to 0, and the others divided by a mean with it in: the loss was 0."""
    prev, data = torch.tensor([[0.0, -1.0, -1.0, -1.0, -1.0]]), {"input_ids": torch.zeros(1, 5, dtype=torch.int64)}
    data |= {"token_mask": torch.ones(1, 5), "sample_mask": torch.ones(1), "advantages": torch.ones(1, 5)}
    data |= {"prev_logprobs": prev, "generation_logprobs": prev + torch.tensor([[0.0, -100.0, 0, 0, 0]])}
    loss_fn = PolicyLossFn({"surrogate": "reinforce", "importance": {"level": level, "normalize": True}})
    loss, metrics = loss_fn(torch.zeros(1, 5, V, dtype=dtype), data, *count_valid(data), statistics=loss_fn.count(data))
    assert loss.item() == pytest.approx(math.log(V), rel=1e-6)
    ratio = metrics["sampling_importance_ratio"].item()
    assert ratio == pytest.approx(math.exp(100) / (4 if level == "token" else 1), rel=1e-6)


def test_recorded_numbers_that_are_equal_have_a_ratio_of_one() -> None:
    """One side was rounded to the logits' dtype and the other was not."""
    same = torch.full((1, 5), -1.1, dtype=torch.float64) / 3
    data = {
        "input_ids": torch.zeros(1, 5, dtype=torch.int64),
        "token_mask": torch.ones(1, 5),
        "sample_mask": torch.ones(1),
    }
    data |= {"advantages": torch.ones(1, 5), "prev_logprobs": same, "generation_logprobs": same.clone()}
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0})
    _, metrics = loss_fn(torch.zeros(1, 5, V), data, *count_valid(data))
    assert metrics["sampling_importance_ratio"].item() == 1
