"""Training is the same on every layout: the first steps on recorded rollouts, to the last digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from tests.training.helpers import LAYOUTS, Rows, assert_near, recorded_grpo, train_rows

# some seconds; two small steps of each recipe are the same in algorithms/test_recipes.py
pytestmark = pytest.mark.slow
STEPS = 3  # the ratios meet their bounds in each
_rows: dict[tuple[str, str, str], Rows] = {}


def some_steps(layout: str, dtype: str, folder: Path, steps: int = STEPS, **overrides: object) -> Rows:
    """Return the rows of GRPO with the reference KL on recorded rollouts; every rank must report the same ones."""
    key = (layout, dtype, str(sorted(overrides.items())))
    if key not in _rows:
        world, parallel, packing = LAYOUTS[layout]
        arguments = recorded_grpo(folder, parallel, packing, dtype, steps, batch__micro_batch_size=16, **overrides)
        results = run_world(world, train_rows, arguments, timeout=240)
        assert all(rows == results[0] for rows in results)
        _rows[key] = results[0]
    return _rows[key]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one process"])
def test_some_steps_in_float64(layout: str, tmp_path: Path) -> None:
    """Clipping and the KL act from the second update on."""
    expected = some_steps("one process", "float64", tmp_path / "one")
    rows = some_steps(layout, "float64", tmp_path / "many")
    assert_near(rows, expected)
    assert len(expected) == STEPS
    # the run does something: clipping is active, the KL leaves 0, the gradient is there
    assert (
        max(float(row["clip_fraction_high"]) for row in expected)
        > 0
        < max(float(row["clip_fraction_low"]) for row in expected)
    )
    assert float(expected[-1]["kl_penalty"]) > 1e-3 and min(float(row["grad_norm"]) for row in expected) > 0


@pytest.mark.parametrize("layout", ["TP 2 × CP 2 × SP packed", "PP 2"])
def test_the_fused_head_changes_nothing(layout: str, tmp_path: Path) -> None:
    """The first of those steps, with logits that are never whole."""
    expected = some_steps("one process", "float64", tmp_path / "one")
    rows = some_steps(layout, "float64", tmp_path / "fused", steps=2, model__fused_head=True)
    assert_near(rows, expected[:2])


@pytest.mark.parametrize("layout", ["TP 2 × CP 2 × SP packed"])
def test_some_steps_in_float32(layout: str, tmp_path: Path) -> None:
    """Rounding adds up over steps, and what grows faster than it is a fault."""
    expected = some_steps("one process", "float32", tmp_path / "one")
    rows = some_steps(layout, "float32", tmp_path / "many")
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    mine, theirs = (
        [{key: row[key] for key in ("phase", "loss", "grad_norm")} for row in part] for part in (rows, expected)
    )
    assert_near(mine, theirs, rel=1e-5, abs=1e-6)


def test_data_parallel_and_gated_tied_model_in_float64(tmp_path: Path) -> None:
    model = {"model__gated": True, "model__tie_embeddings": True}
    expected = some_steps("one process", "float64", tmp_path / "one", 2, **model)
    for name, world, parallel, packing in (
        ("DP 2", 2, {}, True),
        ("TP 2 × PP 2 × SP", 4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, True),
    ):
        LAYOUTS[name] = (world, parallel, packing)
        rows = some_steps(name, "float64", tmp_path / name, 2, **model)
        assert_near(rows, expected)
