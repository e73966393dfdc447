"""Ratios and estimates beyond e^80, of wrong records: such tokens leave the loss, value and gradient, and are counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import ParallelGroups, count_valid, get_loss
from parallel_rl.testing.cases import step_statistics
from parallel_rl.testing.layouts import make_groups
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.validation import validation
from tests.losses.fault_calls import make_call
from tests.losses.policy_batches import dense_logprobs, dense_valid, random_batch

preload("parallel_rl", "tests.losses.test_overflow")

LINES: list[dict[str, Any]] = [
    {"surrogate": "ppo"},
    {"surrogate": {"name": "ppo", "dual_clip": 3.0}},
    {"surrogate": "ratio"},
    {"surrogate": "cispo"},
    {"surrogate": "sapo"},
    {"surrogate": "topr"},
    {"surrogate": "sppo"},
    {"surrogate": "cpgd"},
    {"surrogate": "dppo"},
    {"surrogate": {"name": "rec", "weight": "importance_sampling", "regularizer": "k2", "regularizer_coef": 0.1}},
    {"surrogate": "ratio", "aggregation": "seq-mean-token-sum", "ratio_level": "sequence-sum"},
    {"surrogate": "ppo", "kl": {"coefficient": 0.3, "gradient": "ratio", "input_clamp": 20.0}},
]


def place_of(data: dict[str, Tensor], sign: int) -> tuple[int, int]:
    """A valid token whose advantage has this sign."""
    row, column = (dense_valid(data) & (data["advantages"] * sign > 0)).nonzero()[3].tolist()
    return row, column


def called(
    loss: str, config: dict, logits: Tensor, data: dict[str, Tensor], counts: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, float]:
    """Loss, gradient and `overflow_tokens`, as on a device, where nobody looks at values."""
    leaf, loss_fn = logits.detach().clone().requires_grad_(), get_loss(loss)(config)
    with validation("never"):
        statistics = step_statistics([(loss_fn, (leaf, data, *counts))])
        share, metrics = loss_fn(leaf, data, *counts, statistics=statistics)
    [gradient] = torch.autograd.grad(share, leaf)
    return share.detach(), gradient, metrics["overflow_tokens"].item()


def without(data: dict[str, Tensor], place: tuple[int, int]) -> dict[str, Tensor]:
    mask = data["token_mask"].clone()
    mask[place] = 0
    return {**data, "token_mask": mask}


def wrong(data: dict[str, Tensor], field: str, place: tuple[int, int], value: float) -> dict[str, Tensor]:
    values = data[field].clone()
    values[place] = value
    return {**data, field: values}


@pytest.mark.parametrize(("dtype", "recorded"), [(torch.float64, -200.0), (torch.float32, -math.inf)])
@pytest.mark.parametrize("config", LINES, ids=str)
def test_a_token_whose_ratio_overflows_is_as_a_masked_one(config: dict, recorded: float, dtype: torch.dtype) -> None:
    """It once was reported as e^80 with gradient 0: a loss of 4e33, and a norm in which no guard saw anything."""
    logits, data = random_batch(4)
    logits, counts = logits.to(dtype), count_valid(data)
    loss, gradient, number = called("policy", config, logits, data, counts)
    assert number == 0 and loss.isfinite() and gradient.norm() > 0
    for sign in (-1, 1):
        place = place_of(data, sign)
        found = called("policy", config, logits, wrong(data, "prev_logprobs", place, recorded), counts)
        want = called("policy", config, logits, without(data, place), counts)
        assert found[2] == 1 and want[2] == 0
        torch.testing.assert_close(found[:2], want[:2], rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-7)


@pytest.mark.parametrize("surrogate", ["ppo", "ratio", "gmpo", "vespo", "kl_cov", "clip_cov"])
@pytest.mark.parametrize("level", ["token", "sequence-mean"])
def test_nothing_else_is_touched_where_a_whole_sequence_is_looked_at(surrogate: str, level: str) -> None:
    if surrogate not in ("ppo", "ratio") and level != "token":
        return
    logits, data = random_batch(4)
    config = {"surrogate": surrogate, "ratio_level": level}
    bad = wrong(data, "prev_logprobs", place_of(data, -1), -math.inf)
    loss, gradient, number = called("policy", config, logits, bad, count_valid(data))
    assert number == 1 and loss.abs() < 10 and gradient.isfinite().all() and gradient.norm() > 0


@pytest.mark.parametrize(("surrogate", "counted"), [("ratio", True), ("ppo", True), ("topr", False), ("cispo", False)])
def test_a_sum_over_a_long_response(surrogate: str, counted: bool) -> None:
    """Its ratio may exceed e^80 though no token's does; a surrogate that bounds it has a value there, which stays."""
    logits, data = random_batch(4)
    data["prev_logprobs"] = dense_logprobs(logits.detach(), data["input_ids"]) - 20.0
    data["advantages"] = -data["advantages"].abs()
    config = {"surrogate": surrogate, "ratio_level": "sequence-sum"}
    loss, gradient, number = called("policy", config, logits, data, count_valid(data))
    long = (dense_valid(data) & (dense_valid(data).sum(1, keepdim=True) > 4)).sum()
    assert (number == long.item() > 0) if counted else number == 0
    assert loss.isfinite() and gradient.isfinite().all()
    if not counted:
        assert gradient.norm() > 0


KL = [
    {"estimator": estimator, "gradient": gradient, **more}
    for estimator in ("k1", "k2", "k3")
    for gradient in ("score-function", "straight-through")
    for more in ({}, {"output_clamp": 10.0})
    if (estimator, gradient) != ("k2", "straight-through")
]


@pytest.mark.parametrize("kl", KL, ids=str)
@pytest.mark.parametrize("loss", ["policy", "reference_kl"])
def test_an_estimate_that_overflows_leaves_the_kl(loss: str, kl: dict) -> None:
    """Against a reference of probability 0, and for k3 one e^100 above the policy: as a masked token, or where both agree."""
    if loss == "policy" and (kl["estimator"], kl["gradient"]) == ("k1", "score-function"):
        return  # whose gradient is not 0 where both agree
    logits, data = random_batch(4)
    counts, place = count_valid(data), place_of(data, -1)
    config = {"surrogate": "reinforce", "kl": {"coefficient": 0.3, **kl}} if loss == "policy" else kl
    own = dense_logprobs(logits.detach(), data["input_ids"])[place].item()
    agreeing = wrong(data, "reference_policy_logprobs", place, own) if loss == "policy" else without(data, place)
    want = called(loss, config, logits, agreeing, counts)
    found = called(loss, config, logits, wrong(data, "reference_policy_logprobs", place, -math.inf), counts)
    assert (found[2], want[2]) == (1, 0)
    torch.testing.assert_close(found[:2], want[:2], rtol=1e-12, atol=1e-15)
    if kl["estimator"] == "k3":
        far = called(loss, config, logits, wrong(data, "reference_policy_logprobs", place, own + 100), counts)
        assert far[2] == 1
        torch.testing.assert_close(far[:2], want[:2], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("loss", "config"),
    [("dpo", {"kind": kind}) for kind in ("sigmoid", "ipo", "nca", "discopop")]
    + [("kto", {}), ("kto", {"baseline": "none"})],
    ids=str,
)
def test_an_infinite_log_ratio_is_not_in_a_responses_sum(loss: str, config: dict) -> None:
    """DPO's loss once was inf beside a finite gradient, KTO's baseline inf."""
    logits, data = random_batch(4)
    logits, data = logits[:6], {name: x[:6] for name, x in data.items()}
    data["preference_labels"] = torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0, -1.0]).double()
    counts = count_valid(data)
    for row in (0, 1, 3):
        place = row, int(data["token_mask"][row, 1:].nonzero()[0, 0]) + 1
        found = called(loss, config, logits, wrong(data, "reference_policy_logprobs", place, -math.inf), counts)
        want = called(loss, config, logits, without(data, place), counts)
        assert found[2] == 1 and found[0].isfinite()
        torch.testing.assert_close(found[:2], want[:2], rtol=1e-12, atol=1e-15)


SPREAD: list[tuple[str, dict, str, float]] = [
    ("policy", {}, "prev_logprobs", -math.inf),
    ("policy", {"ratio_level": "sequence-sum", "surrogate": "ratio"}, "prev_logprobs", -79.0),
    ("policy", {"kl": {"coefficient": 0.1}}, "reference_policy_logprobs", -math.inf),
    ("dpo", {}, "reference_policy_logprobs", -math.inf),
]


def on_ranks(rank: int, packed: bool) -> list[tuple[float, float]]:
    """The share and the number of tokens of each case on TP 2 × CP 2."""
    return [spoiled(case, packed, make_groups(rank, 4, 2, 2)[0]) for case in SPREAD]


def spoiled(case: tuple[str, dict, str, float], packed: bool, groups: ParallelGroups) -> tuple[float, float]:
    loss, config, field, value = case
    call = make_call(loss, config, packed, groups)
    call.data[field] = call.data[field].clone()
    call.data[field][2, 5:7] = value
    with validation("never"):
        share, metrics = call.result()
    return share.item(), metrics["overflow_tokens"].item()


@pytest.mark.parametrize("packed", [False, True])
def test_on_tensor_and_context_ranks(packed: bool) -> None:
    found = run_world(4, on_ranks, packed, timeout=60)
    for i, case in enumerate(SPREAD):
        share, number = spoiled(case, packed, ParallelGroups())
        (first, here), (_, _), (second, there), _ = (ranks[i] for ranks in found)
        assert first + second == pytest.approx(share, rel=1e-12) and abs(share) < 10
        assert here + there == number == (6 if case[3] == -79.0 else 2)
