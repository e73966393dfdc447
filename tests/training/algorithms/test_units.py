"""Agents' recorded rollouts, rows of trajectories with turns, train by units on any number of data ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from parallel_rl.recipes import find_recipe
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.data.examples import Rollout, write_rollouts
from tests.training.helpers import assert_near, run, train_rows

LOSSES = {
    "prompt-mean": {},
    "trajectory-mean": {"ratio_level": "turn-mean"},
    "turn-mean": {"rejection": {"rules": [{"statistic": "k3", "high": 1.0, "level": "turn-mean"}], "denominator": "kept"}},
}  # fmt: skip


def rollouts(count: int) -> list[Rollout]:
    """Trajectories of two or three rows, which lie far apart, each of several turns with the environment's tokens between."""
    g, found = random.Random(3), []
    for place in range(count):
        turns = [turn for turn in range(g.randint(1, 4)) for _ in range(g.randint(1, 4))]
        segments = tuple(-1 if g.random() < 0.2 and i else 5 * turn for i, turn in enumerate(turns))
        tokens = (1, *(g.randint(4, 13) for _ in range(2 + len(segments))))
        logprobs = tuple(-g.random() * 3 for _ in segments)
        found.append(Rollout(tokens, logprobs, place // 4, g.random(), None, run=place % 7 + 2**40, segments=segments))
    return found


def config(folder: Path, mode: str, file: Path, **more: object) -> list[str]:
    options = {"surrogate": "ppo", "aggregation": mode, **LOSSES[mode]}
    return run(
        "grpo_arithmetic.yaml",
        run__dir=folder,
        run__dtype="float64",
        parallel={},
        batch__packing=True,
        batch__micro_batch_size=2,
        data={"rollouts": str(file)},
        warmup="null",
        evaluation="null",
        run__loggers="[]",
        model__layers=1,
        model__hidden=16,
        rl__steps=2,
        rl__prompts=4,
        rl__group_size=4,
        rl__updates=2,
        rl__loss={"name": "policy", "options": options},
        **more,
    )


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow if number else []) for number, mode in enumerate(LOSSES)]
)
def test_units_weigh_the_same_on_one_rank_and_on_two(mode: str, tmp_path: Path) -> None:
    """Rows of a prompt and of a trajectory are dealt to data ranks and micro-batches; the numbers of the run do not move."""
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts(32))
    found = []
    for ranks in (1, 2):
        arguments = config(tmp_path / str(ranks), mode, tmp_path / "rollouts.jsonl")
        results = run_world(ranks, train_rows, arguments, timeout=120)
        assert all(rows == results[0] for rows in results)
        found.append(results[0])
    assert_near(*found)
    assert min(float(row["grad_norm"]) for row in found[0]) > 0


def test_what_the_records_lack_is_named(tmp_path: Path) -> None:
    file, plain = tmp_path / "rollouts.jsonl", [Rollout((1, 4, 5), (-1.0,), 0, 0.5, None, run=1)] * 32
    write_rollouts(file, plain)
    with pytest.raises(WorldError, match=r"line 1: the field 'segments' is missing; rl.loss reads 'segment_ids'"):
        run_world(1, train_rows, config(tmp_path / "run", "turn-mean", file))
    with pytest.raises(
        ValueError, match=r"reads 'run_ids', which samples do not have; data.rollouts gives it by .*'run'"
    ):
        load_config(str(find_recipe("grpo")), ["--rl.loss.options.aggregation=trajectory-mean"])
