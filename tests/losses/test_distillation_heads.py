"""Heads of student and teacher that do not fit each other are refused, on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from parallel_rl import FullDistillationLossFn, LMHeadInput, NLLLoss, count_valid
from parallel_rl.groups import ParallelGroups
from parallel_rl.losses.core.base import LossFn
from parallel_rl.testing.layouts import make_groups
from parallel_rl.testing.pool import preload, run_world
from tests.losses.test_distillation import make
from tests.losses.test_distillation_from_hidden_states import VOCAB, WIDER, D, operands

preload("tests.losses.test_distillation_from_hidden_states")


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
        r"the teacher's head has 10 rows, which are token ids \[0, 10\); the student's 9 are token ids \[0, 9\)",
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
    with pytest.raises(ValueError, match="teacher_logits is an LMHeadInput and the student gives logits; give both"):
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
