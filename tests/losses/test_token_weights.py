"""Weights of tokens: what they multiply, what the loss is divided by, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import ComponentsLossFn, LossFn, NLLLoss, PolicyLossFn, count_valid, get_loss, register_objective
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.testing.batches import make_batch
from parallel_rl.testing.pool import WorldError, preload, run_world
from tests.losses.steps import step

preload("parallel_rl", "parallel_rl.testing.batches")

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length", "token-sum"]
PARTS = [range(5), range(5, 6), range(6, 12)]


def batch() -> tuple[Tensor, dict[str, Tensor]]:
    logits, data, _ = make_batch(11, False, "nll", torch.float64)
    return logits, data


def options(mode: str, kind: str) -> dict[str, Any]:
    return {"aggregation": mode, "token_weights": kind, **({"max_length": 9} if mode == "constant-length" else {})}


def by_hand(logits: Tensor, data: dict[str, Tensor], terms: Tensor, mode: str, kind: str) -> Tensor:
    """Σ w·ℓ over rows and columns, divided as the mode says; terms [B, S] token-aligned."""
    w = torch.where(data["token_mask"].bool() & data["sample_mask"].bool()[:, None], data["token_weights"], 0)[:, 1:]
    sizes = w if kind == "sum" else (w > 0).double()
    n_seq, total = float(data["sample_mask"].sum()), logits.new_zeros(())
    for i in range(len(logits)):
        row = (w[i] * torch.where(w[i] > 0, terms[i, 1:], 0)).sum()
        n_i = float(sizes[i].sum()) or 1.0
        share = {
            "token-mean": 1 / sizes.sum(),
            "seq-mean-token-mean": 1 / (n_seq * n_i),
            "seq-mean-token-sum": 1 / n_seq,
            "constant-length": 1 / (n_seq * 9),
            "token-sum": 1.0,
        }[mode]
        total = total + row * share
    return total


def nll_terms(logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    scores = logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(scores[:, :1]), -scores], 1)


@pytest.mark.parametrize("parts", [None, PARTS])
@pytest.mark.parametrize(
    ("mode", "kind"), [*((mode, "count") for mode in MODES), *((mode, "sum") for mode in MODES[:2])]
)
def test_nll_by_hand(mode: str, kind: str, parts: list[range] | None) -> None:
    """A count of masked tokens, a local sum of weights, or a weight that is squared is off."""
    logits, data = batch()
    leaf = logits.clone().requires_grad_()
    want = by_hand(leaf, data, nll_terms(leaf, data), mode, kind)
    want.backward()
    found = step(NLLLoss(options(mode, kind)), logits, data, parts)
    assert found.loss == pytest.approx(want.item(), rel=1e-12)
    assert leaf.grad is not None
    torch.testing.assert_close(found.gradient, leaf.grad, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(
    ("mode", "kind"), [("token-mean", "count"), ("seq-mean-token-mean", "sum"), ("token-sum", "count")]
)
def test_policy_by_hand(mode: str, kind: str) -> None:
    """Every term of a token is multiplied: the surrogate (REINFORCE), the KL to the reference (k2) and the entropy bonus."""
    logits, data = batch()
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).roll(1, 1)
    nll = nll_terms(leaf, data)
    kl = (data["reference_policy_logprobs"] + nll).square() / 2
    want = by_hand(leaf, data, data["advantages"] * nll + 0.3 * kl - 0.1 * entropy, mode, kind)
    want.backward()
    config = {
        "surrogate": "reinforce",
        "kl": {"coefficient": 0.3, "estimator": "k2", "gradient": "plain"},
        "entropy_bonus": 0.1,
    }
    found = step(PolicyLossFn({**config, **options(mode, kind)}), logits, data, PARTS)
    assert found.loss == pytest.approx(want.item(), rel=1e-12)
    assert leaf.grad is not None
    torch.testing.assert_close(found.gradient, leaf.grad, rtol=1e-9, atol=1e-14)


@register_objective("doc_squared")
def Squared(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    return logprobs.square()


LOSSES = [
    lambda **more: NLLLoss({"weighting": "phi", **more}),
    lambda **more: PolicyLossFn({"ratio_level": "sequence-mean", "entropy_filter": 0.6, **more}),
    lambda **more: get_loss("reference_kl")(more),
    lambda **more: get_loss("distillation")(more),
    lambda **more: get_loss("full_distillation")(more),
    lambda **more: Squared(more),
]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("kind", ["count", "sum"])
@pytest.mark.parametrize("make", LOSSES)
def test_weights_of_0_and_1_are_a_mask(make: Any, kind: str, mode: str) -> None:
    """Loss, gradient and every metric, with NaN and ids of no word in the fields of tokens that a weight of 0 leaves out."""
    logits, data = batch()
    ones = data["token_weights"] > 0
    masked = step(make(aggregation=mode), logits, {**data, "token_mask": data["token_mask"].bool() & ones})
    data["token_weights"] = ones.double()
    for name in ("advantages", "prev_logprobs", "reference_policy_logprobs"):
        data[name] = torch.where(ones, data[name], math.nan)
    data["input_ids"] = torch.where(ones, data["input_ids"], 10**6)
    data["teacher_topk_indices"] = torch.where(ones[..., None], data["teacher_topk_indices"], 10**6)
    found = step(make(aggregation=mode, token_weights=kind), logits, data)
    assert found.loss == masked.loss and found.metrics == masked.metrics
    assert torch.equal(found.gradient, masked.gradient)


def test_weights_of_a_component_are_a_field_of_any_name() -> None:
    logits, data = batch()
    alone = step(NLLLoss({"token_weights": "count"}), logits, data)
    data["ce_weights"] = data.pop("token_weights")
    nll = {"loss": {"name": "nll", "options": {"token_weights": "count"}}, "fields": {"token_weights": "ce_weights"}}
    found = step(ComponentsLossFn({"components": {"ce": nll}}), logits, data, PARTS)
    assert found.loss == pytest.approx(alone.loss, rel=1e-13)
    torch.testing.assert_close(found.gradient, alone.gradient, rtol=1e-12, atol=0)


def test_a_plain_sum_needs_no_count_of_the_step() -> None:
    logits, data = batch()
    loss_fn = NLLLoss({"token_weights": "count", "aggregation": "token-sum"})
    assert not loss_fn.needs_statistics
    loss, _ = loss_fn(logits, data, *count_valid(data))
    assert loss.item() == pytest.approx(by_hand(logits, data, nll_terms(logits, data), "token-sum", "count").item())
    assert (
        NLLLoss({"token_weights": "count"}).needs_statistics and not NLLLoss({"token_weights": "count"}).needs_collect
    )


def test_a_step_without_a_weight_is_an_exact_zero() -> None:
    logits, data = batch()
    data["token_weights"] = torch.zeros_like(data["token_weights"])
    for kind in ("count", "sum"):
        found = step(NLLLoss({"token_weights": kind}), logits, data)
        assert found.loss == 0 and not found.gradient.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: NLLLoss({"token_weights": "mean"}),
            "token_weights = 'mean' is not valid; choose one of 'count', 'sum'",
        ),
        (
            lambda: NLLLoss({"token_weights": "sum", "aggregation": "token-sum"}),
            "token_weights = 'sum' has no effect with aggregation = 'token-sum', which is not divided by weights; take 'count'",
        ),
        (
            lambda: PolicyLossFn({"token_weights": "sum", "positive_nll_weight": 0.1}),
            "token_weights = 'sum' is incompatible with positive_nll_weight",
        ),
    ],
)
def test_configs_that_do_not_do(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def spoiled(value: float | None) -> dict[str, Tensor]:
    _, data = batch()
    row, column = next(
        (i, t) for i in range(12) for t in range(1, 16) if data["token_mask"][i, t] and data["sample_mask"][i]
    )
    if value is None:
        del data["token_weights"]
    else:
        data["token_weights"][row, column] = value
    return data


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-0.5, r"token_weights = -0\.5 at \[\d+, \d+\] must be finite and at least 0; 0 masks"),
        (math.inf, r"token_weights = inf at \[\d+, \d+\] must be finite"),
        (math.nan, r"token_weights = nan at \[\d+, \d+\] must be finite"),
        (None, "data lacks the field 'token_weights'"),
    ],
)
def test_weights_that_do_not_do(value: float | None, message: str) -> None:
    logits, right = batch()
    loss_fn: LossFn = NLLLoss({"token_weights": "count"})
    data, statistics = spoiled(value), loss_fn.count(right)
    with pytest.raises(ValueError, match=message):
        loss_fn.count(data)
    with pytest.raises(ValueError, match=message):
        loss_fn(logits, data, *count_valid(data), statistics=statistics)


def refused_on(rank: int) -> None:
    NLLLoss({"token_weights": "count"}).count([spoiled(-1.0) if rank == 1 else batch()[1]], dist.new_group([0, 1]))


def test_a_bad_weight_of_one_rank_is_refused_on_all() -> None:
    with pytest.raises(WorldError, match="rank 1: token_weights = -1 at") as error:
        run_world(2, refused_on, timeout=60)
    assert str(error.value).count("ValueError") >= 2
