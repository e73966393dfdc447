"""Explicit `vocab_start`s that do not tile the vocabulary are refused on all tensor ranks, whatever reads the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from parallel_rl import NLLLoss, token_logprobs
from parallel_rl.testing.pool import run_world
from parallel_rl.vocab.sampling import sample_tokens
from parallel_rl.vocab.stats import token_stats

WORDS = 9
DATA = {"input_ids": torch.tensor([[1, 8, 4]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}


def _calls(start: int | None, logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    group, spans = dist.group.WORLD, {"vocab_size": WORDS, "vocab_start": start}
    counts = torch.tensor(1), torch.tensor(2)
    return {
        "loss": lambda: NLLLoss(**spans)(logits, DATA, *counts, vocab_parallel_group=group),
        "token_stats": lambda: token_stats(logits, DATA["input_ids"], group=group, **spans),
        "token_logprobs": lambda: token_logprobs(logits, DATA, vocab_parallel_group=group, **spans),
        "sample_tokens": lambda: sample_tokens(logits, torch.zeros(1, 3, dtype=torch.int64), group=group, **spans),
    }


def _on_shards(rank: int, splits: Sequence[Sequence[tuple[int | None, int]]]) -> list[str]:
    """What each reader says of each split, in turn."""
    found = []
    for split in splits:
        start, width = split[rank]
        for name, call in _calls(start, torch.zeros(1, 3, width)).items():
            try:
                call()
                found.append(f"{name} ok")
            except ValueError as error:
                found.append(str(error))
    return found


def test_spans_that_overlap_or_leave_a_hole_are_refused() -> None:
    """Four readers, each of which has its own agreement; and a split that was refused leaves nothing behind."""
    overlap, hole, short, good = ((0, 5), (4, 5)), ((0, 4), (5, 4)), ((0, 4), (4, 4)), ((4, 5), (0, 4))
    ranks = run_world(2, _on_shards, (overlap, hole, short, good))
    assert ranks[0] == ranks[1]
    for place, said in enumerate(("[0, 5), [4, 9)", "[0, 4), [5, 9)", "[0, 4), [4, 8)")):
        for text in ranks[0][4 * place : 4 * place + 4]:
            assert f"the columns of the tensor ranks are {said}; they must be [0, vocab_size = 9)" in text
    assert all(text.endswith(" ok") for text in ranks[0][12:])


def test_a_start_on_one_rank_only_is_refused() -> None:
    """Else the rank that gave it would wait for the others in a collective of its own."""
    ranks = run_world(2, _on_shards, (((0, 5), (None, 4)),))
    assert ranks[0] == ranks[1]
    assert all(
        "differ in how many give a vocab_start (1, or 0): it is 0 on one and 1 on another" in x for x in ranks[0]
    )
