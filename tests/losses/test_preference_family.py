"""Losses of preference pairs: golden rows, every kind against a second expression, and what no split or mask may change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl import CPOLossFn, DPOLossFn, ORPOLossFn, SimPOLossFn, get_loss
from parallel_rl.functional import preference as objectives
from parallel_rl.testing.batches import ROWS, make_batch
from tests import reference_preference
from tests.losses.steps import coefficients, cut, one_token_rows, step

# pc, pr, rc, rr of the specification, as (even, odd) rows
POLICY, REFERENCE = [-10.0, -11.0, -12.0, -9.0], [-10.5, -10.0, -11.0, -10.0]
H = [0.5 + 1.0, -1.0 - 1.0]  # (pc - rc) - (pr - rr) of the two pairs
AVERAGES = [-2.5, -2.2, -3.0, -1.8]  # pc/4, pr/5
DPO = {"reference_policy_kl_penalty": 0.1}
DENSE = {name: getattr(reference_preference, name) for name in ("dpo", "simpo", "cpo", "orpo")}


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dpo_slope(h: float) -> float:
    return -0.1 * sigma(-0.1 * h)


Row = tuple[dict[str, Any], float, Callable[[float], float]]
ROWS_OF_DPO: list[Row] = [
    ({}, 0.709548, dpo_slope),
    ({"label_smoothing": 0.1}, 0.707048, lambda h: 0.9 * dpo_slope(h) + 0.1 * 0.1 * sigma(0.1 * h)),
    (
        {"kind": "robust", "label_smoothing": 0.1},
        0.712673,
        lambda h: (0.9 * dpo_slope(h) - 0.1 * 0.1 * sigma(0.1 * h)) / 0.8,
    ),
    ({"kind": "ipo"}, 30.625, lambda h: 2 * (h - 5)),
    ({"kind": "hinge"}, (0.85 + 1.2) / 2, lambda h: -0.1),
]


@pytest.mark.parametrize(("config", "value", "slope"), ROWS_OF_DPO, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_golden_rows_with_a_reference(config: dict[str, Any], value: float, slope: Callable[[float], float]) -> None:
    """Values to the printed digits; dL/d log-prob is ±f'(h)/2 pairs."""
    logits, data = one_token_rows(POLICY, REFERENCE)
    got = step(DPOLossFn({**DPO, **config}), logits, data)
    assert got.loss == pytest.approx(value, abs=1e-6)
    expected = [sign * slope(h) / 2 for h in H for sign in (1, -1)]
    assert coefficients(got.gradient, POLICY) == pytest.approx(expected, rel=1e-4)  # 1 - p is exact to 1e-5 only


def test_golden_row_of_simpo() -> None:
    logits, data = one_token_rows(AVERAGES)
    got = step(SimPOLossFn({"beta": 2.0, "gamma": 1.0}), logits, data)
    assert got.loss == pytest.approx(2.608365, abs=1e-6)
    slopes = [-2 * sigma(1.6), -2 * sigma(3.4)]
    expected = [sign * slope / 2 for slope in slopes for sign in (1, -1)]
    assert coefficients(got.gradient, AVERAGES) == pytest.approx(expected, abs=1e-9)


def test_golden_row_of_orpo() -> None:
    logits, data = one_token_rows(AVERAGES)
    got = step(ORPOLossFn({"beta": 0.1}), logits, data)
    assert got.metrics["preference_loss"] == pytest.approx(0.121855, abs=1e-6)
    assert got.metrics["sft_loss"] == pytest.approx(2.75) and got.loss == pytest.approx(2.75 + 0.121855, abs=1e-6)
    odds = [a - math.log(1 - math.exp(a)) for a in AVERAGES]
    expected = []
    for w, r in ((0, 1), (2, 3)):
        slope = -0.1 * sigma(odds[r] - odds[w]) / 2
        expected += [slope / (1 - math.exp(AVERAGES[w])) - 0.5, -slope / (1 - math.exp(AVERAGES[r]))]
    assert coefficients(got.gradient, AVERAGES) == pytest.approx(expected, abs=1e-9)


CASES: list[tuple[str, dict[str, Any]]] = [
    *(("dpo", {**DPO, "kind": kind}) for kind in reference_preference.KINDS if kind != "exo"),
    ("dpo", {**DPO, "kind": "exo", "label_smoothing": 0.01}),
    ("dpo", {"label_smoothing": 0.2, "sft_loss_weight": 0.3}),
    ("dpo", {"kind": "robust", "label_smoothing": 0.2, "preference_average_log_probs": True}),
    ("dpo", {"kind": "ipo", "preference_average_log_probs": True, "reference_policy_kl_penalty": 0.5}),
    ("dpo", {"length_desensitization": 0.0}),
    ("dpo", {"length_desensitization": 0.4, "kind": "hinge", "preference_average_log_probs": True}),
    ("simpo", {}),
    ("simpo", {"beta": 0.5, "gamma": 0.0, "label_smoothing": 0.1}),
    ("cpo", {}),
    ("cpo", {"label_smoothing": 0.1, "sft_loss_weight": 0.0}),
    ("orpo", {"beta": 0.7}),
]


@pytest.mark.parametrize(("loss", "config"), CASES, ids=str)
def test_against_a_second_expression(loss: str, config: dict[str, Any]) -> None:
    batch = make_batch(3, False, loss, torch.float64)
    leaf = batch.logits.clone().requires_grad_()
    want, metrics = DENSE[loss](leaf, batch.data, config)
    want.backward()
    got = step(get_loss(loss)(config), batch.logits, batch.data)
    assert got.loss == pytest.approx(want.item(), rel=1e-11)
    assert got.metrics == pytest.approx(metrics, rel=1e-11, abs=1e-14)
    torch.testing.assert_close(got.gradient, leaf.grad, rtol=1e-9, atol=1e-14)


def test_length_desensitization_by_hand() -> None:
    """One token against two: the second token of the longer response counts α, in policy and reference."""
    logits, data = one_token_rows([-1.0, -1.0], [0.0, 0.0])
    logits = torch.cat([logits[:, :1], logits], 1)  # a second token like the first
    data["input_ids"] = torch.zeros(2, 3, dtype=torch.int64)
    data["token_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]])
    data["reference_policy_logprobs"] = torch.tensor([[0.0, -2.0, -3.0], [0.0, -1.5, math.nan]], dtype=torch.float64)
    got = step(DPOLossFn({"length_desensitization": 0.25}), logits, data)
    assert got.metrics["rewards_chosen_mean"] == pytest.approx((-1 + 2) + 0.25 * (-1 + 3))
    assert got.metrics["rewards_rejected_mean"] == pytest.approx(0.5)


# What the origins get wrong, or cannot do.


@pytest.mark.parametrize("kind", sorted(reference_preference.KINDS))
def test_far_from_zero_everything_is_finite(kind: str) -> None:
    """h = ±20000: values of DPO and cDPO are linear there, none overflows, no gradient is NaN."""
    logits, data = one_token_rows([-1.0] * 4, [-2e4, -1.0, -1.0, -2e4])
    got = step(DPOLossFn({"kind": kind, **({"label_smoothing": 1e-3} if kind == "exo" else {})}), logits, data)
    assert math.isfinite(got.loss) and bool(got.gradient.isfinite().all())
    if kind == "sigmoid":
        assert got.loss == pytest.approx(0.05 * 19999 / 2)


def test_log_one_minus_exp_keeps_its_digits() -> None:
    """Q58: log(1 − e^a) as log1p(−e^a) is −inf at a = −1e-8 in float32."""
    a = torch.tensor([-50.0, -1.0, -0.7, -0.69, -1e-3, -1e-6])
    exact = [math.log1p(-math.exp(x)) if x < -1e-2 else math.log(-math.expm1(x)) for x in a.tolist()]
    torch.testing.assert_close(objectives.log1mexp(a), torch.tensor(exact), rtol=3e-7, atol=0)
    for dtype in (torch.float32, torch.float64):
        near = torch.tensor([-1e-8, -1e-30, 0.0], dtype=dtype, requires_grad=True)
        odds = objectives.log_odds(near)
        odds.sum().backward()
        assert near.grad is not None and bool(odds.isfinite().all()) and bool(near.grad.isfinite().all())
        assert near.grad.tolist()[2] == 1  # p = 1 to the last digit: its logits have no gradient left to give


@pytest.mark.parametrize("confident", [0, 1], ids=["chosen", "rejected"])
@pytest.mark.parametrize("margin", [12.0, 15.5, 30.0])
def test_orpo_of_a_certain_response_in_float32(margin: float, confident: int) -> None:
    """1 − e^a has float32's digits: a cap at float64's ε made this loss 5.80 where it is 3.79."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 40, 5, generator=g)
    ids = torch.randint(0, 5, (2, 40), generator=g)
    logits[confident, :-1].scatter_add_(1, ids[confident, 1:, None], torch.full((39, 1), margin))
    # all tokens but one are certain to the last digit: their mean lies between 0 and what float32 tells from it
    logits[confident, 1:-1].scatter_add_(1, ids[confident, 2:, None], torch.full((38, 1), 40.0))
    data = {"input_ids": ids, "token_mask": torch.ones(2, 40), "sample_mask": torch.ones(2)}
    got = step(ORPOLossFn(), logits, data)
    leaf = logits.double().requires_grad_()
    rows = leaf.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].mean(1)
    capped = rows.clamp(max=-torch.finfo(torch.float32).eps)
    odds = capped - torch.log(-torch.expm1(capped))
    want = -rows[0] - 0.1 * torch.nn.functional.logsigmoid(odds[0] - odds[1])
    want.backward()
    assert leaf.grad is not None
    assert got.loss == pytest.approx(want.item(), rel=1e-2, abs=2e-9)
    torch.testing.assert_close(got.gradient.double(), leaf.grad, rtol=0.1, atol=1e-6)


def test_long_responses_keep_their_difference() -> None:
    """Sums of 4096 float32 log-probs run in float64: the loss is that of the exact sums."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4097, 5, generator=g) * 3
    logits[1] = logits[0]
    logits[1, 7] += 1e-3 * torch.randn(5, generator=g)
    ids = torch.randint(0, 5, (1, 4097), generator=g).expand(2, -1).contiguous()
    data = {"input_ids": ids, "token_mask": torch.ones(2, 4097), "sample_mask": torch.ones(2)}
    config = {"beta": 100.0, "sft_loss_weight": 0.0}
    got = step(CPOLossFn(config), logits, data)
    exact = step(CPOLossFn(config), logits.double(), data)
    assert exact.metrics["rewards_chosen_mean"] < -1e4
    assert got.loss == pytest.approx(exact.loss, rel=3e-5)  # one float32 sum of 1e4 would leave 1e-3·β of it


@pytest.mark.parametrize("loss", ["dpo", "simpo", "cpo", "orpo"])
def test_nothing_valid_is_an_exact_connected_zero(loss: str) -> None:
    batch = make_batch(3, False, loss, torch.float64)
    data = {**batch.data, "sample_mask": torch.zeros(ROWS)}
    got = step(get_loss(loss)(), torch.full_like(batch.logits, math.nan), data)
    assert got.loss == 0 and not got.gradient.any()
    assert all(value == 0 for value in got.metrics.values())


@pytest.mark.parametrize("loss", ["dpo", "simpo", "cpo", "orpo"])
def test_empty_responses_are_finite(loss: str) -> None:
    batch = make_batch(3, False, loss, torch.float64)
    data = {**batch.data, "token_mask": batch.data["token_mask"].clone()}
    data["token_mask"][0:2] = 0
    data["token_mask"][7] = 0
    got = step(get_loss(loss)(), batch.logits, data)
    assert math.isfinite(got.loss) and bool(got.gradient.isfinite().all()) and not got.gradient[0:2].any()


def test_a_masked_row_takes_its_pair_with_it() -> None:
    batch = make_batch(3, False, "dpo", torch.float64)
    data = {name: value.clone() for name, value in batch.data.items()}
    data["sample_mask"][1] = 0
    logits = batch.logits.clone()
    logits[1] = math.nan
    data["reference_policy_logprobs"][1] = math.inf
    got = step(DPOLossFn({"sft_loss_weight": 0.5}), logits, data)
    assert math.isfinite(got.loss) and not got.gradient[0:2].any()


pair_orders = st.permutations(range(ROWS // 2))


@settings(max_examples=10, deadline=None)
@given(
    case=st.sampled_from(CASES), order=pair_orders, cuts=st.sets(st.integers(1, ROWS // 2 - 1)), seed=st.integers(0, 99)
)
def test_the_order_of_pairs_and_their_micro_batches_change_nothing(
    case: tuple[str, dict[str, Any]], order: list[int], cuts: set[int], seed: int
) -> None:
    loss, config = case
    batch = make_batch(seed, False, loss, torch.float64)
    whole = step(get_loss(loss)(config), batch.logits, batch.data)
    split = step(get_loss(loss)(config), batch.logits, batch.data, cut(order, cuts, pairs=True))
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(split.gradient, whole.gradient, rtol=1e-11, atol=1e-15)


BAD: list[tuple[type, dict[str, Any], str]] = [
    (DPOLossFn, {"kind": "sigmoud"}, "kind = 'sigmoud' is not valid; choose one of 'sigmoid', 'robust', 'ipo'"),
    (DPOLossFn, {"kind": "ipo", "label_smoothing": 0.1}, "label_smoothing = 0.1 has no effect with kind = 'ipo'"),
    (DPOLossFn, {"label_smoothing": 0.5}, r"label_smoothing = 0.5 must lie in \[0, 0.5\)"),
    (DPOLossFn, {"label_smoothing": -0.1}, r"label_smoothing = -0.1 must lie in \[0, 0.5\)"),
    (DPOLossFn, {"kind": "exo"}, "label_smoothing = 0 makes kind = 'exo' infinite"),
    (DPOLossFn, {"length_desensitization": 1.0}, r"length_desensitization = 1.0 must lie in \[0, 1\)"),
    (DPOLossFn, {"preference_loss_weight": 0.0, "sft_loss_weight": 1.0, "kind": "ipo"}, "kind = 'ipo' has no effect"),
    (SimPOLossFn, {"beta": 0.0}, "beta = 0.0 must be positive"),
    (SimPOLossFn, {"gama": 0.5}, "unknown key gama = 0.5 in SimPOLossConfig; did you mean 'gamma'"),
    (SimPOLossFn, {"label_smoothing": 0.7}, "label_smoothing = 0.7 must lie"),
    (CPOLossFn, {"sft_loss_weight": -1.0}, "sft_loss_weight = -1.0 must be at least 0"),
    (CPOLossFn, {"sft_loss_weight": 0.0, "sft_average_log_probs": True}, "has no effect with sft_loss_weight = 0"),
    (ORPOLossFn, {"beta": math.nan}, "beta = nan must be positive"),
]


@pytest.mark.parametrize(("loss", "config", "message"), BAD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_configs_that_do_not_do(loss: type, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(config)


@pytest.mark.parametrize("loss", ["simpo", "cpo", "orpo"])
def test_odd_rows_are_refused(loss: str) -> None:
    logits, data = one_token_rows([-1.0, -2.0, -3.0])
    with pytest.raises(ValueError, match=r"pairs are \(even, odd\) rows, so their number must be even; got 3 rows"):
        step(get_loss(loss)(), logits, data)


def test_a_missing_reference_is_named() -> None:
    logits, data = one_token_rows([-1.0, -2.0])
    with pytest.raises(ValueError, match="data lacks the field 'reference_policy_logprobs'"):
        step(DPOLossFn({"kind": "ipo"}), logits, data)


@settings(max_examples=50, deadline=None)
@given(a=st.floats(-1e4, -1e-12), b=st.floats(-1e4, -1e-12))
def test_odds_are_a_growing_function(a: float, b: float) -> None:
    low, high = objectives.log_odds(torch.tensor(sorted([a, b]), dtype=torch.float64)).tolist()
    assert low <= high


def test_objectives_keep_dtype_and_shape() -> None:
    x = torch.randn(3, 2)
    for kind in (objectives.dpo, objectives.ipo, objectives.nca, objectives.discopop, objectives.apo_down):
        result: Tensor = kind(x, -x)
        assert result.shape == x.shape and result.dtype == x.dtype
