"""Distillation from the hidden states of student and teacher against dense float64, and heads that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_rl import DistillationLossFn, FullDistillationLossFn, LMHeadInput, NLLLoss, count_valid
from parallel_rl.groups import ParallelGroups
from parallel_rl.losses.core.base import LossFn
from parallel_rl.testing.layouts import make_groups
from parallel_rl.testing.pool import preload, run_world
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


def test_rows_beyond_the_bound_are_named_and_without_a_look_nan() -> None:
    _, data = make()
    given = operands()
    data["teacher_logits"] = LMHeadInput(given["teacher_hidden"], given["teacher_weight"])  # type: ignore[assignment]
    loss_fn, counts, head = FullDistillationLossFn(), count_valid(data), LMHeadInput(given["hidden"], given["weight"])
    bounded = LMHeadInput(given["hidden"], given["weight"], rows=2)
    with pytest.raises(ValueError, match="rows = 2, but 7 rows of one rank's hidden states carry loss"):
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


# Heads that do not fit.


def heads(**change: Any) -> tuple[LMHeadInput, dict[str, Any]]:
    """A student's head, and data with a teacher's in which something is changed ("student": of the student's)."""
    _, data = make()
    given = operands()
    of_student = change.pop("student", {})
    of_teacher = {"hidden": given["teacher_hidden"], "weight": given["teacher_weight"], **change}
    student = LMHeadInput(**{"hidden": given["hidden"], "weight": given["weight"], **of_student})
    return student, {**data, "teacher_logits": LMHeadInput(**of_teacher)}


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"weight": torch.zeros(VOCAB + 1, WIDER, dtype=torch.float64)},
        r"the teacher's head has 10 rows, which are words \[0, 10\) of the vocabulary; the student's 9 are words \[0, 9\)",
    ),
    (
        {"weight": torch.zeros(VOCAB, D, dtype=torch.float64)},
        r"teacher_logits: weight has shape \[9, 6\]; hidden \[4, 6, 10\] calls for \[V/tp, 10\]",
    ),
    (
        {"weight": torch.zeros(VOCAB, WIDER)},
        "teacher_logits: weight is torch.float32 on cpu, hidden torch.float64 on cpu; they must be the same",
    ),
    ({"hidden": torch.zeros(4, 6, WIDER, dtype=torch.int64)}, "teacher_logits: hidden must be floating point"),
    (
        {"hidden": torch.zeros(4, 6, WIDER, device="meta"), "weight": torch.zeros(VOCAB, WIDER, device="meta")},
        "the teacher's hidden states are on meta, the student's on cpu",
    ),
    (
        {"hidden": torch.zeros(4, 5, WIDER, dtype=torch.float64)},
        r"teacher_logits has shape \[4, 5, 9\]; it must begin like the model's output \[4, 6, 9\]",
    ),
    (
        {"sequence_parallel": True},
        "the teacher's sequence_parallel = True splits its hidden states as the student's are",
    ),
    ({"mode": "recompute"}, "the teacher's mode = 'recompute' has no effect"),
    ({"budget": 1 << 20}, "the teacher's budget = 1048576 has no effect"),
    ({"main_grad_factor": 1.0}, "the teacher's main_grad_factor has no effect"),
    (
        {"student": {"mode": "resident"}},
        "mode = 'resident' is not valid for FullDistillationLossFn, which keeps no logits",
    ),
    ({"student": {"budget": 300}}, "budget = 300 bytes is too small for one row of logits with its gradient, and the"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_heads_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    student, data = heads(**change)
    with pytest.raises(ValueError, match=message):
        FullDistillationLossFn()(student, data, *count_valid(data))


def test_a_teacher_of_hidden_states_goes_with_a_student_of_hidden_states() -> None:
    student, data = heads()
    logits = torch.zeros(4, 6, VOCAB, dtype=torch.float64)
    with pytest.raises(ValueError, match="teacher_logits is an LMHeadInput beside logits of the student; give both"):
        FullDistillationLossFn()(logits, data, *count_valid(data))
    NLLLoss()(student, data, *count_valid(data))  # what a loss does not read does not concern it
    data["token_mask"] = data["teacher_logits"]
    with pytest.raises(ValueError, match="token_mask must be a tensor, got LMHeadInput"):
        FullDistillationLossFn()(student, data, *count_valid(heads()[1]))


def test_another_padding_of_the_teachers_vocabulary() -> None:
    """On one rank the words are the first rows of both heads, however many more each has."""
    student, data = heads(weight=torch.cat([operands()["teacher_weight"], torch.full((3, WIDER), math.nan).double()]))
    plain_student, plain = heads()
    loss, _ = FullDistillationLossFn(vocab_size=VOCAB)(student, data, *count_valid(data))
    want, _ = FullDistillationLossFn()(plain_student, plain, *count_valid(plain))
    assert_close(loss, want)


def _faults_on_one_rank(rank: int) -> list[tuple[str, float, float]]:
    groups, (tp_rank, cp_rank, _) = make_groups(rank, 4, 2, 2)
    seen = []
    spoils: list[Callable[[dict[str, Any]], object]] = [
        lambda teacher: teacher.update(weight=teacher["weight"][:-2]),
        lambda teacher: teacher.update(weight=teacher["weight"].double()),
        lambda teacher: teacher.update(hidden=teacher["hidden"][:, :1]),
        lambda teacher: teacher.update(hidden=teacher["hidden"].to("meta"), weight=teacher["weight"].to("meta")),
        lambda teacher: teacher.update(softcap=-1.0),
    ]
    for spoil in spoils:
        right = _share(groups, tp_rank, cp_rank, None)
        told = "nothing"
        try:
            _share(groups, tp_rank, cp_rank, spoil if rank == 3 else None)
        except ValueError as error:
            told = str(error)
        seen.append((told, right, _share(groups, tp_rank, cp_rank, None)))
    return seen


def _share(
    groups: ParallelGroups, tp_rank: int, cp_rank: int, spoil: Callable[[dict[str, Any]], object] | None
) -> float:
    g = torch.Generator().manual_seed(1)
    hidden, of_teacher = torch.randn(4, 8, D, generator=g), torch.randn(4, 8, WIDER, generator=g)
    weight, wider = torch.randn(12, D, generator=g), torch.randn(12, WIDER, generator=g)
    tokens = slice(4 * cp_rank, 4 * cp_rank + 4)
    mine = slice(6 * tp_rank, 6 * tp_rank + 6)
    teacher: dict[str, Any] = {"hidden": of_teacher[:, tokens], "weight": wider[mine]}
    if spoil is not None:
        spoil(teacher)
    data: dict[str, Any] = {
        "input_ids": torch.zeros(4, 8, dtype=torch.int64), "token_mask": torch.ones(4, 8), "sample_mask": torch.ones(4),
        "teacher_logits": LMHeadInput(**teacher),
    }  # fmt: skip
    loss_fn: LossFn = FullDistillationLossFn(vocab_size=11, cp_layout="contiguous")
    student = LMHeadInput(hidden[:, tokens], weight[mine])
    loss, _ = loss_fn(student, data, *count_valid(data), None, groups.tensor, groups.context)
    return loss.item()


def test_one_ranks_teacher_is_wrong_and_all_ranks_say_so() -> None:
    """Before any collective of the loss: nothing hangs, and the groups work on."""
    results = run_world(4, _faults_on_one_rank, timeout=60)
    texts = [[told for told, _, _ in seen] for seen in results]
    assert texts == [texts[0]] * 4
    for text, part in zip(
        texts[0],
        ("the logits' last dimension is 4 on tensor rank 1", "weight is", "[4, 1, 6]", "are on meta", "softcap = -1.0"),
        strict=True,
    ):
        assert text.startswith("rank 3: ") and part in text, texts[0]
    for seen in results:
        assert all(before == after for _, before, after in seen)
