"""The benchmark of prefix trees counts what it says, and compares rows that give the same gradients."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import trees
from parallel_rl import build_tree

CASE, ALONE = trees.Case(8, 512, 128), trees.Case(8, 0, 512)
GOOD = trees.Figures((5120, 1536), (3.0, 1.0), (0.3, 0.1), (0.3, 0.1), (10, 4), 0.02, 3.0, 3.2)


def test_it_tells_which_figure_is_missed() -> None:
    assert trees.missed({CASE: GOOD, ALONE: dataclasses.replace(GOOD, time_ratio=0.99, flops_ratio=1.0)}) == []
    slow = dataclasses.replace(GOOD, time_ratio=2.8, build=0.03)
    assert [line.split("; ")[1] for line in trees.missed({CASE: slow})] == ["2.88 is the figure", "26 is the figure"]
    [line] = trees.missed({ALONE: dataclasses.replace(GOOD, time_ratio=0.97, flops_ratio=1.0)})
    assert "0.97 x the tree's; 0.98" in line


def test_tokens_and_pairs_are_those_of_the_arithmetic() -> None:
    assert CASE.tokens == (5120, 1536) and ALONE.tokens == (4096, 4096)
    n, p, a, _ = CASE
    flat, tree = CASE.pairs
    assert flat == n * (p + a) ** 2 / 2 and tree == p**2 / 2 + n * (p * a + a**2 / 2)


@pytest.mark.parametrize("case", [CASE, ALONE, trees.Case(2, 8, 4, depth=6), trees.Case(3, 2, 3, depth=3)])
def test_tokens_and_pairs_are_those_of_the_tree_that_is_built(case: trees.Case) -> None:
    data, lengths = trees.group_data(case, vocab=50)
    tree = build_tree(data["input_ids"], lengths)
    assert (tree.flat_tokens, tree.tokens) == case.tokens
    assert case.pairs == (float((lengths**2).sum()) / 2, float(tree.depth.sum()) + tree.tokens / 2)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_it_runs_to_its_report(tmp_path: Path) -> None:
    """Takes twenty seconds: a process imports torch and megatron-core."""
    target = tmp_path / "trees.json"
    sizes = ["--answers", "3", "--unit", "8", "--layers", "1", "--hidden", "16", "--heads", "2", "--vocab", "32"]
    assert trees.main([*sizes, "--repeats", "1", "--json", str(target)]) == 0
    written = json.loads(target.read_text())["results"]
    assert {name: one["tokens"] for name, one in written.items()} == {
        "3 answers, 32 : 8": [120, 56],
        "3 answers, 16 : 16": [96, 64],
        "3 answers, 8 : 32": [120, 104],
        "2 answers, depth 6, 8 : 2": [576, 132],
        "3 answers, 0 : 32": [96, 96],
    }
