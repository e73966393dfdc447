"""Training is the same on every layout: the first 20 steps on recorded rollouts, to the last digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from tests.training.helpers import LAYOUTS, recorded_grpo, train_rows

# two minutes; in seconds, three small steps are the same in config/test_algorithms.py
pytestmark = pytest.mark.slow
TOLERANCE = {"float64": (1e-8, 1e-12), "float32": (1e-5, 1e-6)}
_rows: dict[tuple[str, str, str], list[dict[str, float | str]]] = {}


def some_steps(
    layout: str, dtype: str, folder: Path, steps: int = 20, **overrides: object
) -> list[dict[str, float | str]]:
    """Rows of so many steps of GRPO with the reference KL on recorded rollouts; every rank must report the same ones."""
    key = (layout, dtype, str(sorted(overrides.items())))
    if key not in _rows:
        world, parallel, packing = LAYOUTS[layout]
        arguments = recorded_grpo(folder, parallel, packing, dtype, steps, batch__micro_batch_size=8, **overrides)
        results = run_world(world, train_rows, arguments, timeout=240)
        assert all(rows == results[0] for rows in results)
        _rows[key] = results[0]
    return _rows[key]


def compare(
    rows: list[dict[str, float | str]], expected: list[dict[str, float | str]], dtype: str, keys: set[str]
) -> None:
    relative, absolute = TOLERANCE[dtype]
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for key in keys:
            assert row[key] == pytest.approx(other[key], rel=relative, abs=absolute), f"{key} at step {row['step']}"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one process"])
def test_twenty_steps_in_float64(layout: str, tmp_path: Path) -> None:
    """May take over twenty seconds: only after some steps do clipping and the KL act, and do small differences grow."""
    expected = some_steps("one process", "float64", tmp_path / "one")
    rows = some_steps(layout, "float64", tmp_path / "many")
    compare(rows, expected, "float64", set(expected[0]) - {"phase"})
    assert len(expected) == 20
    # the run does something: clipping is active, the KL leaves 0, the gradient is there
    assert (
        max(float(row["clip_fraction_high"]) for row in expected)
        > 0
        < max(float(row["clip_fraction_low"]) for row in expected)
    )
    assert float(expected[-1]["kl_penalty"]) > 1e-3 and min(float(row["grad_norm"]) for row in expected) > 0


@pytest.mark.parametrize("layout", ["TP 2 × CP 2 × SP packed", "PP 2"])
def test_the_fused_head_changes_nothing(layout: str, tmp_path: Path) -> None:
    """The first of those steps, with logits that are never whole; may take over twenty seconds."""
    expected = some_steps("one process", "float64", tmp_path / "one")
    rows = some_steps(layout, "float64", tmp_path / "fused", steps=8, model__fused_head=True)
    compare(rows, expected[:8], "float64", set(expected[0]) - {"phase"})


@pytest.mark.parametrize("layout", ["TP 2 × CP 2 × SP packed"])
def test_twenty_steps_in_float32(layout: str, tmp_path: Path) -> None:
    """May take over twenty seconds: rounding adds up over steps, and what grows faster than it is a fault."""
    expected = some_steps("one process", "float32", tmp_path / "one")
    rows = some_steps(layout, "float32", tmp_path / "many")
    compare(rows, expected, "float32", {"loss", "grad_norm"})


def test_data_parallel_and_gated_tied_model_in_float64(tmp_path: Path) -> None:
    """May take over twenty seconds: three runs of twenty steps, two of them on several ranks."""
    model = {"model__gated": True, "model__tie_embeddings": True}
    expected = some_steps("one process", "float64", tmp_path / "one", **model)
    for name, world, parallel, packing in (
        ("DP 2", 2, {}, True),
        ("TP 2 × PP 2 × SP", 4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, True),
    ):
        LAYOUTS[name] = (world, parallel, packing)
        rows = some_steps(name, "float64", tmp_path / name, **model)
        compare(rows, expected, "float64", set(expected[0]) - {"phase"})
