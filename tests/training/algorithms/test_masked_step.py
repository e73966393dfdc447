"""A step in which dynamic sampling keeps no prompt."""

from __future__ import annotations

from pathlib import Path

from parallel_rl.testing.pool import run_world
from tests.training.helpers import run, train_rows


def test_a_step_without_a_sample_leaves_the_kl_coefficient(tmp_path: Path) -> None:
    """There is no KL to lead; it is no metric of the step either, for a mean of nothing is NaN."""
    arguments = run(
        "grpo_arithmetic.yaml",
        run__dir=tmp_path,
        parallel="{}",
        warmup="null",
        data__examples="null",
        evaluation="null",
        data__held_out="null",
        reward="long_answers",
        model__hidden=16,
        rl__steps=2,
        rl__prompts=4,
        rl__group_size=2,
        rl__advantages="{name: grpo, kl_coefficient: 0.1}",
        rl__reward_kl="k3",
        rl__kl_controller="{target: 0.1, horizon: 1000}",
        rl__dynamic_sampling="{low: 50, high: 60, max_rounds: 2, exhausted: mask}",
    )
    [rows] = run_world(1, train_rows, arguments)
    assert [(row["kl_coefficient"], row["grad_norm"]) for row in rows] == [(0.1, 0.0)] * 2
    assert all("reward_kl" not in row for row in rows)
