"""Gradients that are not finite, and spikes: named by rank, micro-batch and row, or left out and counted."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.config.sections import OptimizerConfig
from tests.training.helpers import run, train_rows

SMALL = {
    "model__layers": 1,
    "model__hidden": 16,
    "evaluation": "null",
    "data__held_out": "null",
    "sft__steps": 4,
    "sft__batch_size": 8,
    "batch__micro_batch_size": 2,
}


def _given(folder: Path, **more: object) -> list[str]:
    return run("sft_arithmetic.yaml", run__dir=folder, **{"parallel": "{}", **SMALL, **more})


def test_the_message_names_ranks_micro_batches_and_rows(tmp_path: Path) -> None:
    """Weights that overflowed: "the gradient norm is nan" left the user to search all ranks' data."""
    with pytest.raises(WorldError) as failure:
        run_world(2, train_rows, _given(tmp_path, sft__optimizer__lr=1e38, sft__optimizer__clip="null"))
    assert sorted(failure.value.errors) == [0, 1]
    for text in failure.value.errors.values():
        assert "the gradient norm is nan; not finite: data rank 0, micro-batch 0: log-probs of rows 0, 1" in text
        assert "data rank 0, micro-batch 1: log-probs of rows 2, 3" in text and "and 1 more" in text
        assert "The last good checkpoint is kept" in text and "optimizer.on_nonfinite = 'skip'" in text


def _nan_at(rank: int, given: list[str], steps: tuple[int, ...]) -> list[dict[str, float | int | str]]:
    from parallel_rl.training.models import train_step

    norm, count = train_step.grad_norm, iter(range(1, 100))

    def spoilt(*arguments: object) -> object:
        value = norm(*arguments)  # type: ignore[arg-type]
        return value * math.nan if next(count) in steps else value

    with mock.patch.object(train_step, "grad_norm", spoilt):
        return train_rows(rank, given)


def test_a_step_that_is_left_out_changes_no_weight_and_is_counted(tmp_path: Path) -> None:
    skip = {"sft__optimizer__on_nonfinite": "skip", "sft__optimizer__max_skips": 2, "run__checkpoint_every": 1}
    rows, same = run_world(2, _nan_at, _given(tmp_path, **skip, run__keep_checkpoints=9), (2, 3))
    assert rows == same and [row.get("skipped_updates", 0) for row in rows] == [0, 1, 1, 0]
    assert "loss" not in rows[1] and float(rows[1]["tokens"]) > 0
    assert all(math.isfinite(float(rows[3][name])) for name in ("loss", "grad_norm"))
    shards = [(tmp_path / f"checkpoints/step_00000{step}/__0_0.distcp").read_bytes() for step in (1, 2, 3, 4)]
    assert shards[0] == shards[1] == shards[2] != shards[3]
    with pytest.raises(WorldError, match=r"3 steps in a row had such a norm, and optimizer\.max_skips = 2"):
        run_world(1, _nan_at, _given(tmp_path / "more", **skip), (2, 3, 4))


def test_a_spike_is_treated_as_one_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(
        WorldError, match=r"the gradient norm is [\d.]+, above optimizer\.spike = 0\.001\. The last good"
    ):
        run_world(1, train_rows, _given(tmp_path, sft__optimizer__spike=1e-3))


def test_settings_without_effect() -> None:
    with pytest.raises(ValueError, match="max_skips = 5 has no effect with on_nonfinite = 'error'"):
        OptimizerConfig(lr=1e-3, max_skips=5)
    with pytest.raises(ValueError, match=r"spike = 0\.0 must be a finite number above 0"):
        OptimizerConfig(lr=1e-3, spike=0.0)
