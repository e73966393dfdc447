"""Supervised fine-tuning, plain and weighed by the probability: golden rows and options."""

from __future__ import annotations

import math

import pytest
import torch

from parallel_rl import NLLLoss, count_valid
from parallel_rl.losses.nll import weighted_nll
from tests.losses.test_golden import MASK, L, coefficients, make


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({}, 0.777778),
        ({"weighting": "probability"}, 0.28293),
        ({"weighting": "phi"}, 0.142777),
        ({"weighting": "phi", "cutoff_prob": 0.5}, 0.178814),
    ],
)
def test_golden_rows(config: dict, value: float) -> None:
    logits, data = make()
    loss, metrics = NLLLoss(config)(logits, data, *count_valid(data))
    assert loss.item() == pytest.approx(value, abs=1e-6) and metrics["num_unmasked_tokens"].item() == 9


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, (-1 / 9, -1 / 9, -1 / 9)),
        ({"weighting": "probability"}, (-math.exp(-0.5) / 9, -math.exp(-0.2) / 9, -math.exp(-0.4) / 9)),
        ({"weighting": "phi"}, (-0.026517, -0.016490, -0.024555)),
        ({"weighting": "phi", "cutoff_prob": 0.5}, (0.0, 0.0, 0.0)),
        ({"weighting": "phi", "cutoff_prob": 0.7}, (-0.026517, 0.0, -0.024555)),
    ],
)
def test_gradients(config: dict, want: tuple[float, ...]) -> None:
    logits, data = make()
    NLLLoss(config)(logits, data, *count_valid(data))[0].backward()
    assert logits.grad is not None
    assert coefficients(logits.grad) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("weighting", ["none", "probability", "phi"])
def test_aggregation(weighting: str) -> None:
    logits, data = make()
    per_token = weighted_nll(torch.tensor(L, dtype=torch.float64), weighting)  # type: ignore[arg-type]
    rows = [[x.item() for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(per_token, MASK, strict=True)]
    wants = {
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / 3,
        "seq-mean-token-sum": sum(map(sum, rows)) / 3,
    }
    for aggregation, want in wants.items():
        config = {"weighting": weighting, "aggregation": aggregation}
        assert NLLLoss(config)(logits, data, *count_valid(data))[0].item() == pytest.approx(want, rel=1e-12)
    config = {"weighting": weighting, "aggregation": "constant-length", "max_length": 7}
    want = sum(map(sum, rows)) / 21
    assert NLLLoss(config)(logits, data, *count_valid(data))[0].item() == pytest.approx(want, rel=1e-12)


def test_the_weight_of_an_impossible_token_is_zero_and_its_gradient_finite() -> None:
    logprobs = torch.tensor([-1e4, -0.0, -200.0], requires_grad=True)
    for weighting in ("probability", "phi"):
        loss = weighted_nll(logprobs, weighting)  # type: ignore[arg-type]
        assert loss.isfinite().all()
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert gradient.isfinite().all() and gradient[0] == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cutoff_prob": 0.0, "weighting": "phi"}, r"cutoff_prob = 0.0 must lie in \(0, 1\]; 1 is off"),
        ({"cutoff_prob": 0.5}, "cutoff_prob = 0.5 has no effect with weighting = 'none'; it goes with 'phi'"),
        ({"weighting": "fi"}, "weighting = 'fi' is not valid; choose one of 'none', 'probability', 'phi'"),
        ({"aggregation": "constant-length"}, "max_length = None goes with aggregation 'constant-length' only"),
    ],
)
def test_configs_that_do_not_do(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NLLLoss(config)
