"""KTO: golden rows, the baseline of the whole step, uneven and empty sides, and what no split may change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parallel_rl import KTOLossFn, Statistics, count_valid
from parallel_rl.testing.batches import ROWS, make_batch
from tests import reference_preference
from tests.losses.steps import Step, coefficients, cut, one_token_rows, step

# the specification's pairs as labelled rows, and its KL samples
POLICY, REFERENCE = [-10.0, -12.0, -11.0, -9.0, -8.0, -9.0], [-10.5, -11.0, -10.0, -10.0, -8.4, -9.2]
LABELS = [1.0, 1.0, -1.0, -1.0, 0.0, 0.0]
D = [p - r for p, r in zip(POLICY, REFERENCE, strict=True)]


def golden(config: dict[str, Any], labels: list[float] = LABELS) -> Step:
    logits, data = one_token_rows(POLICY, REFERENCE)
    return step(KTOLossFn(config), logits, {**data, "preference_labels": torch.tensor(labels, dtype=torch.float64)})


def slope(d: float, z: float, label: float) -> float:
    """d/dD of 1 − σ(±β·(D − z₀)), β = 0.1."""
    s = 1 / (1 + math.exp(-0.1 * (d - z)))
    return -label * 0.1 * s * (1 - s)


@pytest.mark.parametrize(
    ("config", "value", "z"),
    [
        ({}, 0.503123, (0.3, 0.3)),
        ({"baseline": "opposite-class"}, 0.50312, (0.0, 0.0)),  # both class means lie below 0
        ({"baseline": "none"}, math.nan, (0.0, 0.0)),
    ],
)
def test_golden_rows(config: dict[str, Any], value: float, z: tuple[float, float]) -> None:
    got = golden(config)
    if not math.isnan(value):
        assert got.loss == pytest.approx(value, abs=1e-6)
    assert (got.metrics["kl_desirable"], got.metrics["kl_undesirable"]) == pytest.approx(z)
    by_class = {1.0: z[0], -1.0: z[1]}
    expected = [slope(d, by_class[label], label) / 4 if label else 0.0 for d, label in zip(D, LABELS, strict=True)]
    assert coefficients(got.gradient, POLICY) == pytest.approx(expected, rel=2e-4, abs=1e-12)
    assert not got.gradient[4:].any()  # z₀ is a constant (Q19)


def test_metrics_and_weights() -> None:
    got = golden({"desirable_weight": 2.0, "undesirable_weight": 0.5})
    plain = golden({})
    assert got.metrics["rewards_desirable_mean"] == pytest.approx((0.5 - 1) / 2)
    assert got.metrics["rewards_undesirable_mean"] == pytest.approx((-1 + 1) / 2)
    assert [got.metrics[f"num_{side}"] for side in ("desirable", "undesirable", "mismatched")] == [2, 2, 2]
    ratio = got.gradient / plain.gradient
    assert ratio[:2, 0].unique().tolist() == pytest.approx([2.0])
    assert ratio[2:4, 0].unique().tolist() == pytest.approx([0.5])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7},
        {"baseline": "opposite-class", "beta": 0.3},
        {"baseline": "none"},
    ],
    ids=str,
)
def test_against_a_second_expression(config: dict[str, Any]) -> None:
    batch = make_batch(4, False, "kto", torch.float64)
    leaf = batch.logits.clone().requires_grad_()
    want, metrics = reference_preference.kto(leaf, batch.data, config)
    want.backward()
    got = step(KTOLossFn(config), batch.logits, batch.data)
    assert got.loss == pytest.approx(want.item(), rel=1e-12)
    assert got.metrics == pytest.approx(metrics, rel=1e-11, abs=1e-14)
    torch.testing.assert_close(got.gradient, leaf.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("baseline", ["mismatched", "opposite-class", "none"])
def test_bools_are_desirable_and_undesirable(baseline: str) -> None:
    """A masked row has no side, whatever its label."""
    logits, data = one_token_rows(POLICY, REFERENCE)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    data["sample_mask"] = torch.tensor([1.0, 1, 1, 1, 1, 0])
    of_signs, of_bools = (
        step(KTOLossFn({"baseline": baseline}), logits, {**data, "preference_labels": labels})
        for labels in (signs, signs > 0)
    )
    assert of_signs.metrics["num_undesirable"] == 3 and of_signs.loss > 0
    assert (of_bools.loss, of_bools.metrics) == (of_signs.loss, of_signs.metrics)
    torch.testing.assert_close(of_bools.gradient, of_signs.gradient, rtol=0, atol=0)


def test_the_opposite_class_gives_the_baseline() -> None:
    """Positive means of both classes: each uses the other's."""
    got = golden({"baseline": "opposite-class"}, [1.0, 0.0, 0.0, -1.0, 1.0, -1.0])
    assert got.metrics["kl_desirable"] == pytest.approx((D[3] + D[5]) / 2)
    assert got.metrics["kl_undesirable"] == pytest.approx((D[0] + D[4]) / 2)


@pytest.mark.parametrize("side", [1.0, -1.0])
@pytest.mark.parametrize("baseline", ["mismatched", "opposite-class", "none"])
def test_one_side_alone(side: float, baseline: str) -> None:
    """Q18: an empty class and no KL row give numbers."""
    got = golden({"baseline": baseline}, [side] * 6)
    assert math.isfinite(got.loss) and bool(got.gradient.isfinite().all())
    assert all(map(math.isfinite, got.metrics.values()))
    assert got.loss > 0 and bool(got.gradient.any())


@pytest.mark.parametrize("baseline", ["mismatched", "opposite-class", "none"])
@pytest.mark.parametrize("labels", [[0] * 6, [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0]], ids=str)
def test_labels_1_and_0_that_mean_good_and_bad_are_refused(labels: list[float], baseline: str) -> None:
    """... of the whole step. As many rows of the baseline as good answers are a step without bad ones."""
    if sum(labels) == 3 and baseline == "mismatched":
        assert golden({"baseline": baseline}, labels).metrics["num_mismatched"] == 3
        return
    zeros = labels.count(0)
    message = rf"are 0 in {zeros} rows, \+1 in {6 - zeros} and -1 in none, .* pass preference_labels\.bool\(\), or -1"
    with pytest.raises(ValueError, match=message):
        golden({"baseline": baseline}, labels)
    logits, data = one_token_rows(POLICY, REFERENCE)
    data["preference_labels"] = torch.tensor([*labels[:5], -1.0], dtype=torch.float64)
    step(KTOLossFn({"baseline": baseline}), logits, data, [range(3), range(3, 6)])


def test_nothing_valid_is_an_exact_connected_zero() -> None:
    batch = make_batch(4, False, "kto", torch.float64)
    data = {**batch.data, "sample_mask": torch.zeros(ROWS), "preference_labels": torch.full((ROWS,), math.nan).double()}
    got = step(KTOLossFn(), torch.full_like(batch.logits, math.nan), data)
    assert got.loss == 0 and not got.gradient.any() and set(got.metrics.values()) == {0.0}


def test_masked_rows_may_hold_anything() -> None:
    batch = make_batch(4, False, "kto", torch.float64)
    right = step(KTOLossFn(), batch.logits, batch.data)
    logits, data = batch.logits.clone(), {name: value.clone() for name, value in batch.data.items()}
    masked = data["sample_mask"] == 0
    logits[masked] = math.nan
    data["reference_policy_logprobs"][masked] = math.inf
    data["preference_labels"][masked] = 17.0
    data["input_ids"][masked] = -9
    got = step(KTOLossFn(), logits, data)
    assert (got.loss, got.metrics) == (right.loss, right.metrics)
    torch.testing.assert_close(got.gradient, right.gradient, rtol=0, atol=0)


@settings(max_examples=10, deadline=None)
@given(
    order=st.permutations(range(ROWS)),
    cuts=st.sets(st.integers(1, ROWS - 1)),
    labels=st.lists(st.sampled_from([1.0, -1.0, 0.0]), min_size=ROWS, max_size=ROWS),
    baseline=st.sampled_from(["mismatched", "opposite-class", "none"]),
)
def test_order_and_micro_batches_change_nothing(
    order: list[int], cuts: set[int], labels: list[float], baseline: str
) -> None:
    """The KL and the denominators are of the whole step, however few of its rows a micro-batch holds."""
    batch = make_batch(4, False, "kto", torch.float64)
    valid = [label for label, kept in zip(labels, batch.data["sample_mask"].tolist(), strict=True) if kept]
    assume(-1.0 in valid or 0.0 not in valid)
    data = {**batch.data, "preference_labels": torch.tensor(labels, dtype=torch.float64)}
    loss_fn = KTOLossFn({"baseline": baseline, "undesirable_weight": 0.6})
    whole = step(loss_fn, batch.logits, data)
    split = step(loss_fn, batch.logits, data, cut(order, cuts))
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-11, abs=1e-14)
    torch.testing.assert_close(split.gradient, whole.gradient, rtol=1e-10, atol=1e-15)


def test_it_needs_its_statistics() -> None:
    logits, data = one_token_rows(POLICY, REFERENCE)
    data["preference_labels"] = torch.tensor(LABELS)
    with pytest.raises(
        ValueError, match=r"KTOLossFn in this configuration needs statistics= of the whole step, its collect\("
    ):
        KTOLossFn()(logits, data, *count_valid(data))
    statistics = KTOLossFn().collect(logits, data, *count_valid(data))
    assert isinstance(statistics, Statistics)
    assert statistics["mismatched_log_ratio"].item() == pytest.approx(0.6)
    assert statistics["mismatched_rows"].item() == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0 must be positive"),
        ({"desirable_weight": -1.0}, "desirable_weight = -1.0 must be at least 0"),
        ({"desirable_weight": 0.0, "undesirable_weight": 0.0}, "are both 0, so the loss would be 0"),
        (
            {"baseline": "batch"},
            "baseline = 'batch' is not valid; choose one of 'mismatched', 'opposite-class', 'none'",
        ),
    ],
)
def test_configs_that_do_not_do(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KTOLossFn(config)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            torch.tensor([1.0, -1.0, 2.0, 0.0, 0.0, 1.0]),
            r"preference_labels = 2 at \[2\] is not valid; \+1 is desirable",
        ),
        (torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0, 0.5]), r"preference_labels = 0.5 at \[5\] is not valid"),
        (torch.tensor([math.nan, -1.0, 1.0, 0.0, 0.0, 1.0]), r"preference_labels is NaN at \[0\], a valid place"),
        (torch.tensor([1, -1, 1, 0, 0, 1]), "preference_labels must be floating point or bool, got torch.int64"),
        (torch.ones(6, 1), r"preference_labels has shape \[6, 1\]; .* calls for \[6\]"),
        (None, "data lacks the field 'preference_labels'"),
    ],
    ids=str,
)
def test_labels_that_do_not_do(labels: torch.Tensor | None, message: str) -> None:
    logits, data = one_token_rows(POLICY, REFERENCE)
    if labels is not None:
        data["preference_labels"] = labels
    with pytest.raises(ValueError, match=message):
        step(KTOLossFn(), logits, data)
