"""A teacher's top-k as data: the dense one's, on any layout, from logits and from hidden states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import LMHeadInput, SequenceLayout, build_tree
from parallel_rl.losses.teacher_topk import teacher_topk
from parallel_rl.testing.layouts import make_groups
from parallel_rl.testing.pool import preload, run_world

preload("tests.losses.test_teacher_topk")

B, S, V, D, K = 4, 8, 11, 5, 3
LENGTHS = [8, 5, 7, 4]


def make() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Hidden states and a head whose logits tie nowhere, and masks."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, S, D, generator=g, dtype=torch.float64)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64)
    mask = (torch.arange(S) < torch.tensor(LENGTHS)[:, None]) & (torch.rand(B, S, generator=g) < 0.8)
    data = {"input_ids": torch.zeros(B, S, dtype=torch.int64), "token_mask": mask.long()}
    return hidden, weight, {**data, "sample_mask": torch.tensor([1.0, 1, 0, 1])}


def dense(temperature: float) -> dict[str, Tensor]:
    hidden, weight, data = make()
    z = (hidden @ weight.T).roll(1, 1)
    valid = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    valid[:, 0] = False
    best, ids = z.topk(K, -1)
    found = {
        "teacher_topk_logits": best, "teacher_topk_indices": ids, "teacher_logsumexp": (z / temperature).logsumexp(-1),
    }  # fmt: skip
    return {name: torch.where(valid.view(B, S, *[1] * (x.dim() - 2)), x, 0) for name, x in found.items()}


def compare(found: dict[str, Tensor], temperature: float = 0.7) -> None:
    for name, want in dense(temperature).items():
        torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-12)


def poisoned() -> Tensor:
    """Hidden states with NaN where the position predicts no valid token."""
    hidden, _, data = make()
    valid = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    return torch.where(torch.cat([valid[:, 1:], torch.zeros(B, 1).bool()], 1)[..., None], hidden, math.nan)


@pytest.mark.parametrize("budget", [None, 1000], ids=["at once", "in chunks"])
def test_alone(budget: int | None) -> None:
    _, weight, data = make()
    options: dict[str, Any] = {"vocab_size": V, "temperature": 0.7}
    padded = torch.cat([weight, torch.full((2, D), math.nan).double()])
    compare(teacher_topk(LMHeadInput(poisoned(), padded, budget=budget), data, K, **options))
    compare(teacher_topk(poisoned() @ weight.T, data, K, temperature=0.7))


def test_on_a_tree() -> None:
    """Rows that share their first tokens have the top-k of rows that stand alone."""
    hidden, weight, data = make()
    ids = torch.arange(B * S).view(B, S)
    ids[1:3, :4], hidden[1:3, :4] = ids[0, :4], hidden[0, :4]
    data = {**data, "input_ids": ids}
    want = teacher_topk(hidden @ weight.T, data, K)
    tree = build_tree(ids, torch.tensor(LENGTHS))
    row = tree.row(hidden)[None]
    for output in (row @ weight.T, LMHeadInput(row, weight, budget=1000)):
        found = teacher_topk(output, data, K, layout=tree.layout())
        for name, x in want.items():
            torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12)


def on_rank(rank: int, packed: bool) -> dict[str, list[dict[str, Tensor]]]:
    groups, (tp_rank, cp_rank, _) = make_groups(rank, 4, 2, 2)
    hidden, weight, data = poisoned(), make()[1], make()[2]
    if packed:
        bounds = [torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (LENGTHS, [8, 8, 8, 4])]
        layout = SequenceLayout.packed(*bounds, seq_len=S, total=28, cp_size=2, cp_rank=cp_rank)
    else:
        layout = SequenceLayout.padded(B, S, cp_size=2, cp_rank=cp_rank)
    local = hidden[layout.sequence_ids, layout.positions].view(*layout.local_shape, D)
    columns = slice(6 * tp_rank, 6 * tp_rank + 6)
    half = slice(tp_rank * local.shape[1] // 2, (tp_rank + 1) * local.shape[1] // 2)
    inputs = [
        local @ weight[columns].T,
        LMHeadInput(local, weight[columns], budget=2000),
        LMHeadInput(local[:, half], weight[columns], sequence_parallel=True, budget=3000),
    ]
    return {
        "found": [
            teacher_topk(x, data, K, None, groups.tensor, groups.context, layout=layout, vocab_size=V, temperature=0.7)
            for x in inputs
        ]
    }


@pytest.mark.parametrize("packed", [False, True])
def test_on_tensor_and_context_ranks(packed: bool) -> None:
    for result in run_world(4, on_rank, packed):
        for found in result["found"]:
            compare(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, r"k = 0 must be an integer in \[1, vocab_size = 11\]"),
        ({"k": 12}, r"k = 12 must be an integer in \[1, vocab_size = 11\]"),
        (
            {"next_token_logits": torch.zeros(B, 5, V)},
            r"the logits have shape \[4, 5, 11\]; the layout needs \[4, 8, V/tp\]",
        ),
        ({"temperature": 0.0}, "temperature = 0.0 must be positive"),
        ({"data": {"token_mask": torch.ones(B, S)}}, "data lacks the field 'sample_mask'"),
        (
            {"data": {"token_mask": torch.ones(B, S), "sample_mask": torch.ones(B, 1)}},
            r"sample_mask must be .*\[4, 1\]",
        ),
        ({"data": {"token_mask": torch.full((B, S), 0.5), "sample_mask": torch.ones(B)}}, "token_mask = 0.5 at"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        teacher_topk(**{"next_token_logits": torch.zeros(B, S, V), "data": make()[2], "k": K, **change})
