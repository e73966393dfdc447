"""The value loss: golden rows, gradients, where the head stands, and what no split or mask may change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl import SequencePackingLossWrapper, ValueLossFn, count_valid
from parallel_rl.losses.value import clipped_squared_error
from parallel_rl.testing.batches import ROWS, make_batch
from tests import reference_heads
from tests.losses.steps import cut, step

V = torch.tensor([[0.1, 0.2, 0.3, 0], [0.5, 0.4, 0.3, 0.2], [-0.1, 0, 0, 0]], dtype=torch.float64)
OLD = V + torch.tensor([[0.5, -0.5, 0.1, 0], [0, 0.3, -0.3, 0.05], [0.2, -0.2, 0, 0]], dtype=torch.float64)
RETURNS = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])


def golden(shifted: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Columns 1 to 4 of the data against the head's output at 0 to 3, or at 1 to 4."""

    def whole(x: Tensor) -> Tensor:
        return torch.cat([torch.full((3, 1), 7, dtype=x.dtype), x], 1)

    junk = torch.full((3, 1), 99.0, dtype=torch.float64)
    head = torch.cat([V, junk] if shifted else [junk, V], 1)[..., None]
    token_mask = torch.cat([torch.zeros(3, 1, dtype=torch.int64), MASK], 1)
    return head, {
        "input_ids": torch.zeros(3, 5, dtype=torch.int64),
        "token_mask": token_mask,
        "sample_mask": torch.ones(3),
        "returns": whole(RETURNS),
        "values": whole(OLD),
    }


@pytest.mark.parametrize("position", ["predictor", "token"])
@pytest.mark.parametrize(
    ("config", "value"),
    [({"cliprange": 0.2}, 0.297222), ({"aggregation": "seq-mean-token-mean"}, 0.314444)],
    ids=str,
)
def test_golden_rows(config: dict[str, Any], value: float, position: str) -> None:
    head, data = golden(position == "predictor")
    assert step(ValueLossFn({**config, "head_position": position}), head, data).loss == pytest.approx(value, abs=1e-6)


def test_gradients_in_closed_form() -> None:
    """scale·(V − R)/N where the plain error is the larger one or no clip bites, 0 where the clipped one is."""
    head, data = golden(True)
    got = step(ValueLossFn({"cliprange": 0.2, "scale": 0.4}), head, data)
    clip = OLD + (V - OLD).clamp(-0.2, 0.2)
    follows = ((clip - RETURNS) ** 2 - (V - RETURNS) ** 2 <= 1e-12) | ((V - OLD).abs() <= 0.2)
    expected = torch.where((MASK != 0) & follows, 0.4 * (V - RETURNS) / 9, 0)
    torch.testing.assert_close(got.gradient[:, :4, 0], expected, rtol=1e-12, atol=1e-15)
    assert not got.gradient[:, 4].any() and not follows[MASK != 0].all()
    fraction = (~follows & (MASK != 0)).sum().item() / 9
    assert got.metrics["vf_clipfrac"] == pytest.approx(fraction)


def test_metrics_give_the_explained_variance() -> None:
    head, data = golden(True)
    m = step(ValueLossFn(), head, data).metrics
    v, r = V[MASK != 0], RETURNS[MASK != 0]
    means = [m[name] for name in ("values_mean", "returns_mean", "returns_sq_mean", "residual_sq_mean")]
    assert means == pytest.approx([x.mean().item() for x in (v, r, r**2, (r - v) ** 2)])
    assert (m["values_min"], m["values_max"]) == pytest.approx((-0.1, 0.5))
    residual = m["residual_sq_mean"] - (m["returns_mean"] - m["values_mean"]) ** 2
    explained = 1 - residual / (m["returns_sq_mean"] - m["returns_mean"] ** 2)
    assert explained == pytest.approx(1 - ((r - v).var() / r.var()).item())


@pytest.mark.parametrize(
    "config",
    [
        {"cliprange": 0.25, "scale": 0.7},
        {"cliprange": 0.25, "aggregation": "seq-mean-token-sum"},
        {"head_position": "token", "cliprange": 0.5},
        {"head_position": "token", "aggregation": "seq-mean-token-mean"},
    ],
    ids=str,
)
def test_against_a_second_expression(config: dict[str, Any]) -> None:
    batch = make_batch(2, False, "value", torch.float64)
    leaf = batch.logits.clone().requires_grad_()
    want, metrics = reference_heads.value(leaf, batch.data, config)
    want.backward()
    got = step(ValueLossFn(config), batch.logits, batch.data)
    assert got.loss == pytest.approx(want.item(), rel=1e-12)
    assert got.metrics == pytest.approx(metrics, rel=1e-11, abs=1e-14)
    torch.testing.assert_close(got.gradient, leaf.grad, rtol=1e-10, atol=1e-15)


def test_the_clipped_error_keeps_its_digits_far_from_zero() -> None:
    """At V = 300 the sum V_old + clamp(...) would cost float32 more than 1e-5 of the error."""
    old = torch.tensor([300.1, -299.7])
    values, returns = old + 1, old - torch.tensor([0.3, 0.4])
    exact = clipped_squared_error(values.double(), returns.double(), old.double(), 0.2)
    got = clipped_squared_error(values, returns, old, 0.2)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("config", [{}, {"cliprange": 0.2, "head_position": "token"}], ids=str)
def test_nothing_valid_is_an_exact_connected_zero(config: dict[str, Any]) -> None:
    batch = make_batch(2, False, "value", torch.float64)
    data = {**batch.data, "sample_mask": torch.zeros(ROWS)}
    got = step(ValueLossFn(config), torch.full_like(batch.logits, math.nan), data)
    assert got.loss == 0 and not got.gradient.any()


@settings(max_examples=10, deadline=None)
@given(
    order=st.permutations(range(ROWS)),
    cuts=st.sets(st.integers(1, ROWS - 1)),
    aggregation=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]),
    position=st.sampled_from(["token", "predictor"]),
)
def test_order_and_micro_batches_change_nothing(
    order: list[int], cuts: set[int], aggregation: str, position: str
) -> None:
    batch = make_batch(2, False, "value", torch.float64)
    loss_fn = ValueLossFn({"cliprange": 0.3, "aggregation": aggregation, "head_position": position})
    whole = step(loss_fn, batch.logits, batch.data)
    split = step(loss_fn, batch.logits, batch.data, cut(order, cuts))
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(split.gradient, whole.gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("position", ["predictor", "token"])
def test_a_packed_row_is_the_same(position: str) -> None:
    head, data = golden(position == "predictor")
    loss_fn = ValueLossFn({"cliprange": 0.2, "head_position": position})
    whole = step(loss_fn, head, data)
    row = head.reshape(1, -1, 1).clone().requires_grad_()
    packed, _ = SequencePackingLossWrapper(loss_fn, torch.tensor([0, 5, 10, 15]))(row, data, *count_valid(data))
    packed.backward()
    assert packed.item() == pytest.approx(whole.loss, rel=1e-14) and row.grad is not None
    torch.testing.assert_close(row.grad.view_as(head), whole.gradient, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cliprange": 0.0}, "cliprange = 0.0 must be positive; None is off"),
        ({"scale": 0.0}, "scale = 0.0 must be positive"),
        ({"max_length": 9}, "max_length = 9 goes with aggregation 'constant-length' only"),
        ({"head_position": "left"}, "head_position = 'left' is not valid; choose one of 'predictor', 'token'"),
        ({"clip_range": 0.2}, "unknown key clip_range = 0.2 in ValueLossConfig; did you mean 'cliprange'"),
    ],
)
def test_configs_that_do_not_do(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ValueLossFn(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"returns": None}, "data lacks the field 'returns'"),
        ({"values": None}, "data lacks the field 'values'"),
        ({"returns": torch.zeros(3, 4)}, r"returns has shape \[3, 4\]; .* calls for \[3, 5\]"),
        ({"values": torch.zeros(3, 5).long()}, "values must be floating point, got torch.int64"),
        ({"returns": torch.full((3, 5), math.nan)}, r"returns is NaN at \[0, 1\], a valid place"),
    ],
    ids=str,
)
def test_fields_that_do_not_do(change: dict[str, Tensor | None], message: str) -> None:
    head, data = golden(True)
    data = {name: value for name, value in {**data, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        step(ValueLossFn({"cliprange": 0.2}), head, data)


def test_column_0_counts_where_the_head_stands_at_the_token() -> None:
    head, data = golden(False)
    data["token_mask"][:, 0] = 1
    loss_fn = ValueLossFn({"head_position": "token"})
    assert step(loss_fn, head, data).gradient[:, 0].all()  # and not behind a predictor
    assert step(ValueLossFn(), head, data).loss == step(ValueLossFn(), *golden(False)).loss
    data["returns"][1, 0] = math.nan
    with pytest.raises(ValueError, match=r"returns is NaN at \[1, 0\], a valid place"):
        step(loss_fn, head, data)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (torch.zeros(3, 5), r"next_token_logits must be \[B, S/cp, V/tp\]"),
        (
            torch.zeros(3, 5, 2),
            r"a scalar head's output must be floating point \[B, S/cp, 1\], got torch.float32 \[3, 5, 2\]",
        ),
        (torch.zeros(3, 4, 1), r"the logits have leading shape \[3, 4\]"),
    ],
)
def test_heads_that_do_not_do(head: Tensor, message: str) -> None:
    _, data = golden(True)
    with pytest.raises(ValueError, match=message):
        ValueLossFn()(head, data, *count_valid(data))
