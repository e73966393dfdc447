"""What a loss says of itself, `token_separable`, is true: the fused head relies on it."""

from __future__ import annotations

import pytest
import torch

from parallel_rl import LossFn, TokenBatch, get_loss, register_objective
from parallel_rl.losses.core.readers import without_dropped
from parallel_rl.testing.alone import gradients, influence, token_batch
from parallel_rl.testing.batches import make_batch
from parallel_rl.testing.cases import Case
from parallel_rl.testing.hidden_states import reads_log_probs
from parallel_rl.vocab.shards import Truncation
from tests.distributed.law import CASES, RECIPES, one_of_each

ON_LOG_PROBS = [case for case in CASES if reads_log_probs(case)]


def batch_of(case: Case, loss_fn: LossFn) -> TokenBatch:
    return token_batch(loss_fn, make_batch(5, False, case.loss, torch.float64))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in RECIPES else ()) for case in ON_LOG_PROBS],
    ids=lambda case: case.name,
)
def test_the_claim_is_true(case: Case) -> None:
    loss_fn = get_loss(case.loss)(case.config)
    found = influence(loss_fn, batch_of(case, loss_fn))
    if loss_fn.requirements.token_separable:
        assert found < 1e-12
    else:
        assert found > 1e-6, "it separates after all: the claim would make the fused head cheaper"


@pytest.mark.parametrize(
    ("config", "separable"),
    [
        ({"importance": {"level": "sequence-mean", "mode": "tis", "high": 1.1}}, True),  # of data alone
        ({"on_policy": True, "importance": {"level": "sequence-mean", "mode": "tis", "high": 1.1}}, False),
        ({"on_policy": True, "importance": {"mode": "seq-mask-tis", "low": 0.9, "high": 1.1}}, False),
        ({"on_policy": True, "importance": {"mode": "tis", "high": 1.1}}, True),
        ({"importance": {"level": "turn-mean", "mode": "tis", "high": 1.1}}, True),
        ({"on_policy": True, "importance": {"level": "turn-mean", "mode": "tis", "high": 1.1}}, False),
        ({"ratio_level": "turn-sum"}, False),
        (
            {"on_policy": True, "rejection": {"rules": [{"statistic": "k3", "high": 0.05, "level": "turn-max"}]}},
            False,
        ),
        ({"on_policy": True, "rejection": {"rules": [{"statistic": "k1", "low": 0.7, "high": 1.4}]}}, True),
        (
            {"on_policy": True, "rejection": {"rules": [{"statistic": "k3", "high": 0.05, "level": "sequence-mean"}]}},
            False,
        ),
        (
            {
                "on_policy": True,
                "aggregation": "seq-mean-token-mean",
                "rejection": {"rules": [{"statistic": "k1", "low": 0.7, "high": 1.4}], "denominator": "kept"},
            },
            False,
        ),
    ],
    ids=str,
)
def test_on_policy_weights_follow_the_present_policy(config: dict, separable: bool) -> None:
    loss_fn = get_loss("policy")(config)
    assert loss_fn.requirements.token_separable == separable
    found = influence(loss_fn, batch_of(Case("policy", config), loss_fn))
    assert (found < 1e-12) == separable


def influence_of_dropped(loss_fn: LossFn, batch: TokenBatch) -> float:
    """How much the gradients of tokens move when a truncation drops other tokens, at most, relative to the gradients."""
    assert batch.output.stats is not None
    g, worst = torch.Generator().manual_seed(0), 0.0
    none = torch.zeros(batch.mask.numel(), dtype=torch.float64)
    base = gradients(loss_fn, batch, none)
    for _ in range(4):
        gone = torch.rand(batch.mask.numel(), generator=g) < 0.4
        stats = batch.output.stats._replace(logprobs=torch.where(gone, -torch.inf, batch.logprobs))
        rest = gradients(loss_fn, without_dropped(batch.local, stats), none)
        scale = max(x.abs().max().item() for x in base)
        worst = max(worst, *((y - x)[~gone].abs().max().item() / scale for x, y in zip(base, rest, strict=True)))
    return worst


@pytest.mark.parametrize("case", one_of_each(ON_LOG_PROBS), ids=lambda case: case.name)
def test_the_claim_under_a_truncation_is_true(case: Case) -> None:
    """What weighs by sequence says so: the tokens that a truncated policy drops change the weight of the others."""
    loss_fn = get_loss(case.loss)(case.config)
    needs = loss_fn.requirements
    if needs.truncatable and needs.separates(Truncation(top_k=3)):
        assert influence_of_dropped(loss_fn, batch_of(case, loss_fn)) < 1e-12


@pytest.mark.parametrize(
    ("config", "separates"),
    [
        ({}, True),
        ({"aggregation": "constant-length", "max_length": 9}, True),
        ({"rejection": {"rules": [{"statistic": "k1", "low": 0.7, "high": 1.4}], "denominator": "kept"}}, True),
        ({"importance": {"mode": "tis", "high": 1.1}}, True),
        ({"aggregation": "seq-mean-token-mean"}, False),
        ({"importance": {"level": "sequence-mean", "mode": "tis", "high": 1.1}}, False),
        ({"importance": {"mode": "seq-mask-tis", "low": 0.9, "high": 1.1}}, False),
        ({"rejection": {"rules": [{"statistic": "k3", "high": 0.2, "level": "sequence-max"}]}}, False),
    ],
    ids=str,
)
def test_dropped_tokens_and_what_weighs_by_sequence(config: dict, separates: bool) -> None:
    loss_fn = get_loss("policy")(config)
    assert loss_fn.requirements.separates(Truncation(top_p=0.9)) == separates
    assert (influence_of_dropped(loss_fn, batch_of(Case("policy", config), loss_fn)) < 1e-12) == separates


def test_only_token_objectives_can_claim_it() -> None:
    with pytest.raises(ValueError, match="goes with level 'token'"):
        register_objective("separable_pair", level="pair", token_separable=True)
