"""The law on the Triton backend: whole losses on two tensor ranks, padded and packed, against the dense references."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import torch

from parallel_rl.testing.cases import Case, Trial
from parallel_rl.testing.check import list_faults
from parallel_rl.testing.layouts import Layout, Rank, make_groups
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.testing.step import Outcome, run_layout
from parallel_rl.vocab.backends.triton import operators
from tests.distributed import law_references
from tests.vocab.triton_cases.common import INTERPRETED

preload("parallel_rl", "tests.distributed.law_references")

SEED, DTYPE = 5, torch.float32
PLAIN = [Case("clipped_pg", {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}), Case("dpo")]
# of a case each: one with logits that are left alone, one with logits that are given up
LAYOUTS = [Layout(2, 1, 1, "padded", 1, "zigzag"), Layout(2, 1, 1, "packed", 3, "zigzag")]


def on_triton(case: Case) -> Case:
    return Case(case.loss, case.config, {"backend": "triton"})


def check_world(rank: int) -> tuple[list[tuple[str, str, Outcome]], Counter[str]]:
    """(case, layout, outcome), and how often each kernel's operator ran."""
    assert INTERPRETED, "the pool's ranks see no card"
    rank_of = Rank(*make_groups(rank, 2, 2, 1))
    found, ran = [], Counter[str]()

    def counted(name: str):  # type: ignore[no-untyped-def]
        operator = getattr(operators, name)

        def call(*args: object) -> object:
            ran[name] += 1
            return operator(*args)

        return patch.object(operators, name, call)

    with counted("vocab_stats"), counted("vocab_combine"), counted("vocab_gradient"), counted("vocab_gradient_"):
        for case, layout in zip(PLAIN, LAYOUTS, strict=True):
            batch = law_references.batch_of(case, SEED, dtype=DTYPE)
            trial = Trial(on_triton(case), batch, law_references.expected(case, batch))
            found.append((case.name, layout.name, run_layout(layout, trial, rank_of, DTYPE)))
    return found, ran


def test_the_law() -> None:
    ranks = run_world(2, check_world, timeout=300)
    for number, (case, layout) in enumerate(zip(PLAIN, LAYOUTS, strict=True)):
        batch = law_references.batch_of(case, SEED, dtype=DTYPE)
        trial = Trial(case, batch, law_references.expected(case, batch))
        assert all(found[number][:2] == (case.name, layout.name) for found, _ in ranks)
        assert list_faults(trial, {layout.name: [found[number][2] for found, _ in ranks]}, 1e-5) == []
    # one micro-batch that keeps its logits, and three that give them up
    assert all(
        ran == {"vocab_stats": 4, "vocab_combine": 4, "vocab_gradient": 1, "vocab_gradient_": 3} for _, ran in ranks
    )
