"""The trainer leads the entropy bonus by the step's own entropy, on every layout, and a resumed run goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from tests.training.helpers import DATA, LAYOUTS, assert_near, cut, run, train_rows

LOSS = (
    "{name: policy, options: {entropy_bonus: "
    "{name: adaptive, target: 2.69, initial: 0.2, delta: 0.05, low: 0.1, high: 0.3}}}"
)
OPTIONS = {
    "model__hidden": 16, "model__layers": 1, "evaluation": "null", "data__held_out": "null", "run__checkpoint_every": 1,
    "run__keep_checkpoints": 5, "run__dtype": "float64", "warmup": "null", "run__loggers": "[]",
    "data": f"{{rollouts: {DATA / 'arithmetic_rollouts.jsonl'}}}", "reward": "exact_match", "rl__steps": 5,
    "rl__prompts": 4, "rl__group_size": 4, "rl__updates": 1, "rl__loss": LOSS, "rl__optimizer": "{lr: 3.0e-2}",
}  # fmt: skip


def curve(folder: Path, layout: str = "one process", steps: int = 5) -> list[dict[str, float | int | str]]:
    ranks, parallel, packing = LAYOUTS[layout]
    arguments = run(
        "grpo_arithmetic.yaml", run__dir=folder, parallel=str(parallel).replace("True", "true"),
        batch__packing=packing, **{**OPTIONS, "rl__steps": steps},
    )  # fmt: skip
    return run_world(ranks, train_rows, arguments)[0]


def test_it_follows_the_entropy_and_resumes(tmp_path: Path) -> None:
    rows = curve(tmp_path / "whole")
    held, wanted = 0.2, [0.0]
    for row in rows:
        low = row["entropy"] <= 2.69  # type: ignore[operator]
        held = min(held + 0.05, 0.3) if low else max(held - 0.05, 0.1)
        wanted.append(held if low else 0.0)
    assert [row["entropy_coef"] for row in rows] == pytest.approx(wanted[:-1], abs=1e-12)
    assert len(set(wanted)) > 2, "it moves"
    cut(tmp_path / "whole", tmp_path / "stopped", 3)
    assert curve(tmp_path / "stopped") == rows[3:]


@pytest.mark.slow
def test_layouts_agree(tmp_path: Path) -> None:
    """Pipeline ranks have the entropies of each token, too: the step's quantile in batching/test_packed_layouts.py."""
    expected = curve(tmp_path / "one", steps=4)
    assert len({row["entropy_coef"] for row in expected}) > 1
    assert_near(curve(tmp_path / "four", "TP 2 × CP 2 × SP packed", steps=4), expected, abs=1e-10)
