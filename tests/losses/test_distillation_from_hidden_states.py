"""Distillation from the hidden states of student and teacher against dense float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_rl import DistillationLossFn, FullDistillationLossFn, LMHeadInput, count_valid
from parallel_rl.testing.pool import preload
from parallel_rl.validation import validation
from tests import reference_distillation as reference
from tests.losses.test_distillation import make, weights_by_hand, with_topk
from tests.vocab.test_divergence import DIVERGENCES, ident

preload("tests.losses.test_distillation_from_hidden_states")

D, WIDER, VOCAB, PADDING = 6, 10, 9, 2
CAP = {"student": 4.0, "teacher": 6.0}
BUDGET = 1 << 11  # bytes: chunks of a few rows


def operands(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Hidden states, weight and bias of both, rounded to `dtype`."""
    g = torch.Generator().manual_seed(7)
    shapes = {
        "hidden": (4, 6, D), "weight": (VOCAB, D), "bias": (VOCAB,),
        "teacher_hidden": (4, 6, WIDER), "teacher_weight": (VOCAB, WIDER), "teacher_bias": (VOCAB,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh((hidden @ weight.T + bias) / cap)


def dense(divergence: dict, given: dict[str, Tensor], data: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss of two temperatures with τ², in float64 from whole logits, and the gradients of the student's operands."""
    wide = {name: x.double().clone() for name, x in given.items()}
    leaves = [wide[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    teacher = logits_of(*(wide[f"teacher_{name}"] for name in ("hidden", "weight", "bias")), CAP["teacher"])
    value = reference.divergence(divergence, teacher / 2.0, logits_of(*leaves, CAP["student"]) / 1.5) * 1.5**2
    loss = (value * weights_by_hand(data, "seq-mean-token-mean")).sum()
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


def padded(x: Tensor, value: float) -> Tensor:
    return torch.cat([x, torch.full_like(x[:PADDING], value)])


def call(
    divergence: dict, given: dict[str, Tensor], data: dict[str, Any], **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """The same of our loss, with NaN in rows without loss and in padding rows of both heads, under a loss scale of 1024."""
    carries = weights_by_hand(data, "token-mean") > 0
    hidden, of_teacher = (
        torch.where(carries[..., None], given[name], math.nan) for name in ("hidden", "teacher_hidden")
    )
    leaves = [x.clone().requires_grad_() for x in (hidden, padded(given["weight"], 0), padded(given["bias"], 0))]
    student, weight, bias = leaves[0] * 1, padded(leaves[1][:VOCAB], math.nan), padded(leaves[2][:VOCAB], math.nan)
    teacher = LMHeadInput(
        of_teacher, padded(given["teacher_weight"], math.nan), padded(given["teacher_bias"], math.nan), CAP["teacher"]
    )
    config = {
        "divergence": divergence, "teacher_temperature": 2.0, "squared_temperature": True,
        "aggregation": "seq-mean-token-mean",
    }  # fmt: skip
    loss_fn = FullDistillationLossFn(config, vocab_size=VOCAB, temperature=1.5)
    head = LMHeadInput(student, weight, bias, CAP["student"], **options)
    loss, _ = loss_fn(head, {**data, "teacher_logits": teacher}, *count_valid(data))
    (loss * 1024).backward()
    found = [x.grad / 1024 for x in leaves]  # type: ignore[operator]
    assert not found[0][~carries].any()
    return loss.detach(), [found[0], found[1][:VOCAB], found[2][:VOCAB]]


@pytest.mark.parametrize("mode", ["auto", "recompute"])
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=ident)
def test_against_dense(divergence: dict, mode: str) -> None:
    """Every divergence through two soft-capped, biased, padded heads of different widths, in chunks of a few rows."""
    _, data = make()
    given = operands()
    want, gradients = dense(divergence, given, data)
    loss, found = call(divergence, given, data, mode=mode, budget=BUDGET)
    assert_close(loss, want, rtol=1e-12, atol=0)
    for mine, truth in zip(found, gradients, strict=True):
        assert_close(mine, truth, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_finite_differences(mode: str) -> None:
    """Of hidden states and weight; in_forward allows one backward a forward, so each of its numbers is a call."""
    _, data = make()
    given, eps = operands(), 1e-6
    divergence = {"name": "jsd", "beta": 0.3}
    _, found = call(divergence, given, data, mode=mode, budget=BUDGET)
    for name, gradient, places in (
        ("hidden", found[0], [(0, 1, 2), (3, 2, 0)]),
        ("weight", found[1], [(0, 0), (8, 5)]),
    ):
        for place in places:
            values = []
            for step in (eps, -eps):
                moved = given[name].clone()
                moved[place] += step
                values.append(call(divergence, {**given, name: moved}, data, mode=mode)[0])
            slope = (values[0] - values[1]) / (2 * eps)
            assert_close(gradient[place], slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_operands_have_exact_products(dtype: torch.dtype) -> None:
    """Against float64 of the same rounded operands: float32's errors, then one rounding of each gradient."""
    _, data = make()
    given = operands(dtype)
    want, gradients = dense({"name": "jsd", "beta": 0.3}, given, data)
    loss, found = call({"name": "jsd", "beta": 0.3}, given, data, budget=BUDGET)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(want.item(), rel=2e-5)
    for mine, truth in zip(found, gradients, strict=True):
        assert mine.dtype == dtype
        error = (mine.double() - truth).norm() / truth.norm()
        assert error <= (1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps)


CONFIGS: list[dict] = [{}, {"kl_type": "reverse", "zero_outside_topk": True}, {"bucket_tail": True}]


@pytest.mark.parametrize("mode", ["auto", "recompute"])
@pytest.mark.parametrize("config", CONFIGS, ids=ident)
def test_the_top_k_against_whole_logits(config: dict, mode: str) -> None:
    """Which `test_distillation` holds against dense rows."""
    _, data = make()
    data, given = with_topk(data), operands()
    loss_fn = DistillationLossFn({**config, "aggregation": "seq-mean-token-mean"}, temperature=1.3)
    leaves = [given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
    want, _ = loss_fn(logits_of(*leaves, CAP["student"]), data, *count_valid(data))
    gradients = torch.autograd.grad(want, leaves)
    head = LMHeadInput(*leaves, CAP["student"], mode=mode, budget=BUDGET)  # type: ignore[arg-type]
    loss, _ = loss_fn(head, data, *count_valid(data))
    assert_close(loss, want, rtol=1e-12, atol=0)
    for mine, truth in zip(torch.autograd.grad(loss * 3, leaves), gradients, strict=True):
        assert_close(mine / 3, truth, rtol=1e-9, atol=1e-13)


def test_the_gradient_goes_into_main_grad_and_nothing_to_the_teacher() -> None:
    _, data = make()
    given = operands()
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    teacher_weight = given["teacher_weight"].requires_grad_()
    data["teacher_logits"] = LMHeadInput(given["teacher_hidden"], teacher_weight)  # type: ignore[assignment]
    loss_fn, counts = FullDistillationLossFn(), count_valid(data)
    loss, _ = loss_fn(LMHeadInput(hidden, weight), data, *counts)
    (want,) = torch.autograd.grad(loss, weight)
    weight.main_grad = torch.ones(weight.shape, dtype=torch.float64)  # type: ignore[attr-defined]
    loss, _ = loss_fn(LMHeadInput(hidden, weight, main_grad_factor=0.5), data, *counts)
    loss.backward()
    assert_close(weight.main_grad, 1 + want / 2)  # type: ignore[attr-defined]
    assert weight.grad is not None and not weight.grad.any() and teacher_weight.grad is None


@pytest.mark.parametrize("config", [{}, {"bucket_tail": True, "overlap": True}], ids=ident)
def test_inference_mode_gives_the_same_bits(config: dict) -> None:
    """Where no gradient can be taken, not even of a leaf that is made on the way."""
    _, data = make()
    data, given, loss_fn = with_topk(data), operands(), DistillationLossFn(config)
    leaf = given["hidden"].clone().requires_grad_()
    want, _ = loss_fn(LMHeadInput(leaf, given["weight"], budget=BUDGET), data, *count_valid(data))
    with torch.inference_mode():
        loss, _ = loss_fn(LMHeadInput(given["hidden"], given["weight"], budget=BUDGET), data, *count_valid(data))
    assert_close(loss, want.detach(), rtol=0, atol=0)


def test_rows_beyond_the_bound_are_named_and_without_a_look_nan() -> None:
    _, data = make()
    given = operands()
    data["teacher_logits"] = LMHeadInput(given["teacher_hidden"], given["teacher_weight"])  # type: ignore[assignment]
    loss_fn, counts, head = FullDistillationLossFn(), count_valid(data), LMHeadInput(given["hidden"], given["weight"])
    bounded = LMHeadInput(given["hidden"], given["weight"], rows=2)
    with pytest.raises(ValueError, match="rows = 2 is too few: 7 rows of one rank's hidden states are scored"):
        loss_fn(bounded, data, *counts)
    with validation("never"):
        assert loss_fn(bounded, data, *counts)[0].isnan() and loss_fn(head, data, *counts)[0].isfinite()


def test_logits_of_neither_are_whole() -> None:
    """Beside the operands and the gradients that backward gives, no tensor is as large as a fifth of whole logits."""
    tokens, words, size = 256, 512, 8
    g = torch.Generator().manual_seed(0)
    hidden, teacher = torch.randn(2, 1, tokens, size, generator=g).unbind()
    weight, of_teacher = torch.randn(2, words, size, generator=g).unbind()
    data: dict[str, Any] = {
        "input_ids": torch.zeros(1, tokens, dtype=torch.int64),
        "token_mask": torch.ones(1, tokens),
        "sample_mask": torch.ones(1),
        "teacher_logits": LMHeadInput(teacher, of_teacher),
    }
    budget, large = tokens * words * 4 // 8, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, Tensor) and x.untyped_storage().nbytes() > tokens * words * 4 / 5:
                    large.append((func, x.shape))
            return out

    with Watch():
        head = LMHeadInput(hidden.clone().requires_grad_(), weight.clone().requires_grad_(), budget=budget)
        FullDistillationLossFn()(head, data, *count_valid(data))[0].backward()
    assert large == []
