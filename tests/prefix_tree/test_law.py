"""The law on prefix trees: every loss on a tree's row gives the numbers of flat rows, on every cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parallel_rl import (
    LMHeadInput,
    NLLLoss,
    PolicyLossFn,
    PrefixTreeLossWrapper,
    SequenceLayout,
    build_tree,
    count_valid,
    token_logprobs,
    token_scores,
)
from parallel_rl.testing.cases import Case, has_scalar_head
from parallel_rl.testing.pool import preload, run_world
from tests.collectives import recorded
from tests.distributed import law
from tests.prefix_tree.law import ALONE, Cut, Truth, check_cuts, run_tree, truth

preload("tests.prefix_tree.law")

# recipes join options that the other cases have
CASES = [*law.CORE, *law.MORE, *law.TRUNCATED]
MORE = [case for case in CASES if case not in law.CORE]  # further options of its losses
# a loss that keeps or rewrites logits, a scalar head and an option that hidden states do not have
OF_HEADS = [
    case for case in (*law.CORE, *law.MORE) if not has_scalar_head(case.loss) and "consume_logits" not in case.options
]
CORE_HEADS = [case for case in law.CORE if case in OF_HEADS]
CUTS = [Cut(2, 2), Cut(2, 2, "contiguous"), Cut(1, 4), Cut(1, 4, "contiguous"), Cut(4, 1)]
HEADS = [Cut(2, 2, head=True), Cut(2, 2, "contiguous", head=True, sequence_parallel=True)]


@cache
def truth_of(case_name: str, seed: int, head: bool) -> Truth:
    return truth(next(case for case in CASES if case.name == case_name), seed, head=head)


@pytest.mark.parametrize("case", law.one_of_each(CASES), ids=lambda case: case.name)
def test_logits(case: Case) -> None:
    for seed in (5, 6) if case in law.CORE else (5,):
        assert run_tree(truth_of(case.name, seed, head=False), Cut(1, 1), ALONE) == []


@pytest.mark.parametrize("case", law.one_of_each(OF_HEADS), ids=lambda case: case.name)
def test_hidden_states(case: Case) -> None:
    assert run_tree(truth_of(case.name, 5, head=True), Cut(1, 1, head=True), ALONE) == []


def _on_ranks(cases: list[Case], cuts: list[Cut]) -> list[list[str]]:
    return run_world(4, check_cuts, cuts, [truth_of(case.name, 5, head=cuts[0].head) for case in cases], timeout=600)


@pytest.mark.parametrize(
    ("cases", "cuts"),
    [
        pytest.param(law.CORE[::2], CUTS[:1], id="core"),
        pytest.param(law.CORE[1::2], CUTS[3:4], id="core, contiguous"),
        pytest.param(law.CORE[::2], CUTS[1:], id="core, other cuts", marks=pytest.mark.slow),
        pytest.param(law.CORE[1::2], [*CUTS[:3], CUTS[4]], id="more of core, other cuts", marks=pytest.mark.slow),
        pytest.param(MORE, [CUTS[0]], id="more", marks=pytest.mark.slow),
    ],
)
def test_cuts(cases: list[Case], cuts: list[Cut]) -> None:
    assert _on_ranks(cases, cuts) == [[]] * 4


@pytest.mark.parametrize(
    ("cases", "cuts"),
    [
        pytest.param(CORE_HEADS[::2], HEADS[1:], id="core"),
        pytest.param(CORE_HEADS, HEADS[:1], id="core, zigzag", marks=pytest.mark.slow),
        pytest.param([case for case in MORE if case in OF_HEADS], HEADS[1:], id="more", marks=pytest.mark.slow),
    ],
)
def test_hidden_states_on_cuts(cases: list[Case], cuts: list[Cut]) -> None:
    assert _on_ranks(cases, cuts) == [[]] * 4


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 5}, {"temperature": torch.linspace(0.5, 2, 12)}], ids=str
)
def test_scores(options: dict[str, Any]) -> None:
    """Log-probs and entropy of flat tokens, as fields [B, S] of a later loss."""
    batch = truth_of("nll", 5, head=False).batch
    lengths = torch.tensor(batch.lengths)
    tree = build_tree(batch.data["input_ids"], lengths)
    data = {"input_ids": torch.where(tree.real, batch.data["input_ids"], 0)}
    row = tree.row(batch.logits)[None]
    padding = torch.tensor([0, *batch.lengths]).cumsum(0)
    packed = SequenceLayout.packed(padding, seq_len=16, total=int(padding[-1]))
    flat = batch.logits[tree.real][None]
    for got, want in zip(
        token_scores(row, data, layout=tree.layout(), entropy=True, **options),
        token_scores(flat, data, layout=packed, entropy=True, **options),
        strict=True,
    ):
        assert got is None or torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    weight = torch.eye(23, dtype=torch.float64)
    head = LMHeadInput(row, weight)
    assert torch.allclose(
        token_logprobs(head, data, layout=tree.layout(), **options),
        token_logprobs(row, data, layout=tree.layout(), **options),
    )


def test_a_head_projects_a_shared_row_once() -> None:
    """Six sequences share five trained tokens, and have two more each: 17 products of a row, not 42."""
    ids = torch.arange(8).expand(6, 8).clone()
    ids[:, 6:] = torch.arange(12).view(6, 2)
    data = {"input_ids": ids, "token_mask": torch.arange(8).expand(6, 8) > 0, "sample_mask": torch.ones(6)}
    tree = build_tree(ids, torch.full((6,), 8))
    head = LMHeadInput(torch.randn(1, tree.row_length, 4), torch.randn(23, 4))
    for read in (
        lambda: PrefixTreeLossWrapper(NLLLoss(), tree)(head, data, *count_valid(data)),
        lambda: token_logprobs(head, data, layout=tree.layout()),
    ):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            read()
        assert counter.get_total_flops() == 2 * (5 + 6 * 2) * 23 * 4


BATCH = {
    "input_ids": torch.tensor([[1, 2, 3], [1, 2, 4]]),
    "token_mask": torch.ones(2, 3),
    "sample_mask": torch.ones(2),
}
LENGTHS = torch.tensor([3, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.tensor([[1, 2, 3], [1, 9, 4]])}, r"input_ids\[1, 1\] is 9, the tree was built with 2"),
        ({"input_ids": torch.ones(3, 3, dtype=torch.int64), "token_mask": torch.ones(3, 3), "sample_mask": torch.ones(3)},
         r"the tree has sequences of shape \[2, 3\], the data has \[3, 3\]"),
        ({"logits": torch.zeros(1, 5, 12)}, r"leading shape \[1, 5\]"),
        ({"logits": torch.zeros(2, 3, 12)}, r"leading shape \[2, 3\]"),
        ({"tree_mask": torch.tensor([[0, 0, 1], [0, 0, 1]])}, r"the loss scores the token at \[0, 1\]"),
        ({**dict.fromkeys(BATCH), "shift_labels": torch.tensor([[2, 3, -100], [2, 4, -100]])}, "shift_labels have no place"),
    ],
)  # fmt: skip
def test_refused_calls(change: dict[str, Any], message: str) -> None:
    logits = change.pop("logits", torch.zeros(1, 4, 12))
    tree = build_tree(BATCH["input_ids"], LENGTHS, token_mask=change.pop("tree_mask", None))
    data = {name: field for name, field in {**BATCH, **change}.items() if field is not None}
    with pytest.raises(ValueError, match=message):
        PrefixTreeLossWrapper(NLLLoss(), tree)(logits, data, torch.tensor(2), torch.tensor(4))


def collectives(rank: int, branches: int) -> tuple[list[str], int]:
    """Collectives of a call on two tensor ranks, and operators, for a prompt with so many answers."""
    ids = torch.cat([torch.arange(4).expand(branches, 4), torch.arange(branches)[:, None] % 30], 1)
    data = {"input_ids": ids, "token_mask": torch.ones_like(ids), "sample_mask": torch.ones(branches)}
    data |= {"advantages": torch.ones(ids.shape), "prev_logprobs": torch.full(ids.shape, -1.0)}
    tree = build_tree(ids, torch.full((branches,), 5))
    loss_fn = PrefixTreeLossWrapper(PolicyLossFn({"entropy_bonus": 0.1}), tree)
    logits = torch.randn(1, tree.row_length, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    group = torch.distributed.group.WORLD
    counts = count_valid(data)
    loss_fn(logits * 1, data, *counts, None, group)  # the layout is computed once
    with recorded() as seen, torch.profiler.profile() as profile:
        loss, _ = loss_fn(logits * 1, data, *counts, None, group)
        loss.backward()
    return seen, sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))


def test_collectives_and_operators_do_not_grow_with_branches() -> None:
    few, many = run_world(2, collectives, 2)[0], run_world(2, collectives, 30)[0]
    assert few[0] == many[0]
    assert many[1] <= few[1] * 1.02
