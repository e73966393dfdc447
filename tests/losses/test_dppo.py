"""DPPO against a second expression of the papers' masks, token by token in Python's floats, and its clip fractions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import PolicyLossFn
from parallel_rl.functional.dppo import binary_kl
from tests.losses.test_policy import dense_logprobs, dense_valid, random_batch, run

FORMS: dict[str, dict[str, Any]] = {
    "SkyRL tv": {"low": 0.03, "high": 0.05},
    "SkyRL kl": {"divergence": "binary_kl", "low": 0.004, "high": 0.006},
    "verl tv": {"low": 0.03, "high": 0.05, "ratio_max": 1.4, "detached": True},
    "verl kl": {"divergence": "binary_kl", "low": 0.004, "high": 0.006, "ratio_max": 1.4, "detached": True},
    "prime-rl ipo": {"low": 0.04, "high": 0.04, "signed": False},
    "capped": {"low": 0.03, "high": 0.05, "ratio_max": 1.4},
    "kl, whatever A is": {"divergence": "binary_kl", "low": 0.004, "high": 0.006, "signed": False},
}


def masked(options: dict[str, Any], p: float, q: float, advantage: float) -> bool:
    """Whether a token of probability p now and q before loses its gradient."""
    moved = p - q
    if options.get("divergence") == "binary_kl":
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        above, below = moved > 0 and kl > options["high"], moved < 0 and kl > options["low"]
    else:
        above, below = moved > options["high"], -moved > options["low"]
    if not options.get("signed", True):
        return above or below
    return above if advantage > 0 else below if advantage < 0 else False


def expected(options: dict[str, Any], logits: Tensor, data: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The loss, and how many tokens are masked."""
    logp, valid = dense_logprobs(logits, data["input_ids"]), dense_valid(data)
    total, dropped = torch.zeros((), dtype=torch.float64), 0
    for i, t in valid.nonzero().tolist():
        new, old, a = logp[i, t], data["prev_logprobs"][i, t], data["advantages"][i, t].item()
        if masked(options, math.exp(new.item()), math.exp(old.item()), a):
            dropped += 1
            continue
        ratio, most = (new - old).exp(), options.get("ratio_max", math.inf)
        if options.get("detached"):
            total = total - a * min(ratio.item(), most) * new
        elif ratio.item() <= most:
            total = total - a * ratio
        else:
            total = total - a * most
    return total / valid.sum(), dropped


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_a_form_equals_its_masks_token_by_token(form: str, seed: int) -> None:
    options = FORMS[form]
    logits, data = random_batch(seed)
    data["advantages"][1, ::3] = 0.0
    loss = run({"surrogate": {"name": "dppo", **options}}, logits, data)
    loss.backward()
    other = logits.detach().clone().requires_grad_()
    want, dropped = expected(options, other, data)
    want.backward()
    assert 0 < dropped < int(dense_valid(data).sum())
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-10, atol=1e-14)


def test_the_binary_kl_is_that_of_two_outcomes() -> None:
    """Also where the rest has a probability that e^l rounds away, in float32."""
    p = torch.tensor([0.3, 0.999, 1e-9, 0.5], dtype=torch.float64)
    q = torch.tensor([0.4, 0.9, 0.2, 0.5], dtype=torch.float64)
    two = q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    torch.testing.assert_close(binary_kl(p.log(), q.log()), two)
    near = torch.tensor([-3e-7, -1e-9, 0.0, 4e-8])  # a log-prob above 0 is rounding
    found = binary_kl(near, torch.full((4,), -0.7))
    exact = binary_kl(near.double().clamp(max=0), torch.full((4,), -0.7).double())
    assert bool(found.isfinite().all()) and bool((found > 1).all())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    assert binary_kl(torch.tensor(-1.0), torch.tensor(-torch.inf)).isfinite()


@pytest.mark.parametrize("form", FORMS)
def test_finite_differences(form: str) -> None:
    """Of a loss that jumps where a mask flips: at a point that is away from one. The detached form is the slope of −A·ρ."""
    options = FORMS[form]
    logits, data = random_batch(4)
    plain = {key: value for key, value in options.items() if key != "detached"}
    detached = options.get("detached", False)
    if detached:  # beyond the cap its gradient stays, that of −A·min(ρ, C) does not
        options, plain = {**options, "ratio_max": 50.0}, {**plain, "ratio_max": 50.0}
    run({"surrogate": {"name": "dppo", **options}}, logits, data).backward()
    step, at = 1e-6, logits.detach()
    for place in [(0, 3, 2), (1, 5, 0), (3, 7, 4), (5, 2, 1)]:
        values = []
        for sign in (1, -1):
            moved = at.clone()
            moved[place] += sign * step
            values.append(run({"surrogate": {"name": "dppo", **plain}}, moved, data).item())
        assert logits.grad is not None
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(logits.grad[place].item(), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "'tv', 'binary_kl'"),
        ({"low": 0.0}, "low = 0.0 must be positive"),
        ({"high": -0.1}, "high = -0.1 must be positive"),
        ({"high": 1.0}, "high = 1.0 must be positive and below 1"),  # no difference of probabilities exceeds it
        ({"divergence": "binary_kl", "high": 0.0}, "high = 0.0 must be positive"),
        ({"ratio_max": 1.0}, "ratio_max = 1.0 must exceed 1"),
        ({"ratio_cap": 2.0}, "did you mean 'ratio_max'"),
    ],
)
def test_options_that_do_not_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLossFn({"surrogate": {"name": "dppo", **options}})


def test_its_region_is_of_single_tokens() -> None:
    with pytest.raises(ValueError, match="ratio_level = 'sequence-mean' has no effect with the surrogate 'dppo'"):
        PolicyLossFn({"surrogate": "dppo", "ratio_level": "sequence-mean"})
