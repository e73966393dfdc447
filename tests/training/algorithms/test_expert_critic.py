"""A critic beside demonstrations, which have no reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from tests.training.helpers import run, train_rows

EXPERTS = {
    "rl__experts": 8,
    "rl__loss": "{name: mix, options: {mu: 0.5, policy: {surrogate: ppo}}}",
}
NONE = {"rl__loss": "{name: policy, options: {surrogate: ppo}}", "data__examples": "null"}


def test_the_critic_learns_from_the_samples_alone(tmp_path: Path) -> None:
    """A return of 0 for a demonstration would be made up: the critic of the first step is the one without any."""
    steps = []
    for name, more in (("with", EXPERTS), ("without", NONE)):
        arguments = run(
            "grpo_arithmetic.yaml",
            run__dir=tmp_path / name,
            run__dtype="float64",
            parallel="{}",
            warmup="null",
            evaluation="null",
            data__held_out="null",
            reward="long_answers",
            model__hidden=16,
            rl__steps=1,
            rl__updates=1,
            rl__prompts=4,
            rl__group_size=2,
            rl__advantages="{name: gae}",
            rl__critic="{optimizer: {lr: 1e-3}}",
            **more,
        )
        [[row]] = run_world(1, train_rows, arguments)
        steps.append({name: value for name, value in row.items() if name.startswith("critic_")})
    assert steps[0] == pytest.approx(steps[1], rel=1e-12)
