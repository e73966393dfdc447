"""Distillation by hand: golden rows of the whole vocabulary and of the top k."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from parallel_rl import DistillationLossFn, FullDistillationLossFn, count_valid
from parallel_rl.losses.core.base import LossFn
from tests import reference_distillation as reference
from tests.vocab.test_divergence import ident

STUDENT, TEACHER, TOP = [1.0, 2.0, 0.5, -1.0], [0.5, 2.5, 0.0, -2.0], [1, 0]


def one_token(loss_fn: LossFn, fields: dict[str, Tensor]) -> tuple[float, Tensor]:
    """The loss of a row of two tokens, and its gradient on the logits that predict the second."""
    logits = torch.tensor([[STUDENT, [0.0] * 4]], dtype=torch.float64, requires_grad=True)
    masks = {"input_ids": torch.tensor([[0, 1]]), "token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1)}
    loss, _ = loss_fn(logits, {**masks, **fields}, *count_valid(masks))
    loss.backward()
    assert logits.grad is not None and not logits.grad[0, 1].any()
    return loss.item(), logits.grad[0, 0]


@pytest.mark.parametrize(
    ("divergence", "value"),
    [
        ("forward_kl", 0.098824),
        ("reverse_kl", 0.116347),
        ("cross_entropy", 0.732693),
        ({"name": "jsd", "beta": 0.1}, 0.008992),
        ({"name": "jsd", "beta": 0.5}, 0.026353),
        ({"name": "jsd", "beta": 0.9}, 0.010225),
        ({"name": "jsd", "beta": 0.0}, 0.098824),
        ({"name": "jsd", "beta": 1.0}, 0.116347),
    ],
    ids=ident,
)
def test_golden_rows_of_the_whole_vocabulary(divergence: str | dict, value: float) -> None:
    teacher = torch.tensor([[TEACHER, [math.nan] * 4]], dtype=torch.float64)
    loss, gradient = one_token(FullDistillationLossFn({"divergence": divergence}), {"teacher_logits": teacher})
    assert loss == pytest.approx(value, abs=1e-6)
    named = {"name": divergence} if isinstance(divergence, str) else divergence
    student = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
    reference.divergence(named, torch.tensor(TEACHER, dtype=torch.float64), student).backward()
    assert_close(gradient, student.grad, rtol=1e-11, atol=1e-14)


def topk_fields(at: int) -> dict[str, Tensor]:
    """The teacher's two largest, stored in column `at`."""
    logits, ids = torch.full((1, 2, 2), math.nan, dtype=torch.float64), torch.full((1, 2, 2), -5)
    logits[0, at], ids[0, at] = torch.tensor(TEACHER, dtype=torch.float64)[TOP], torch.tensor(TOP)
    return {"teacher_topk_logits": logits, "teacher_topk_indices": ids}


@pytest.mark.parametrize("alignment", ["token", "predictor"])
@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({"kl_type": "forward"}, 0.067131),
        ({"kl_type": "reverse"}, 0.082608),
        ({"kl_type": "forward", "zero_outside_topk": True}, 0.249051),
        ({"kl_type": "reverse", "zero_outside_topk": True}, 16.173043),
        ({"kl_type": "mixed"}, (0.067131 + 0.082608) / 2),
        ({"kl_type": "mixed", "mixed_kl_weight": 0.25, "zero_outside_topk": True}, 0.25 * 0.249051 + 0.75 * 16.173043),
    ],
    ids=ident,
)
def test_golden_rows_of_the_top_k(config: dict, value: float, alignment: str) -> None:
    loss_fn = DistillationLossFn({**config, "topk_alignment": alignment})
    loss, gradient = one_token(loss_fn, topk_fields(1 if alignment == "token" else 0))
    assert loss == pytest.approx(value, abs=2e-6)
    student = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
    want = reference.topk(config, torch.tensor(TEACHER)[TOP].double(), torch.tensor(TOP), None, student)
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-12)
    assert_close(gradient, student.grad, rtol=1e-11, atol=1e-13)


def test_the_defaults_are_those_of_nemo() -> None:
    fields = topk_fields(1)
    default = one_token(DistillationLossFn(), fields)[0]
    assert default == one_token(DistillationLossFn({"kl_type": "mixed", "mixed_kl_weight": 0.5}), fields)[0]
