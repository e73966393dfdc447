"""Checkpoints: a run that was stopped continues the same curve, on any layout; a failed save leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest

from tests.distributed.pool import WorldError, run_world
from tests.training.helpers import cut, run, train_rows

SMALL = {
    "model__hidden": 32,
    "reward": "tests.training.helpers:long_answers",
    "batch__micro_batch_size": 16,
    "evaluation": "{samples: 1, every: 2}",
    "warmup": "{steps: 4, batch_size: 16, optimizer: {lr: 3e-3, warmup_steps: 2}}",
    "rl__steps": 4,
    "rl__prompts": 4,
    "rl__group_size": 4,
    "rl__updates": 2,
    "run__keep_checkpoints": 20,
    "run__checkpoint_every": 1,
}


def arguments(folder: Path, dtype: str, parallel: object = "{}", **more: object) -> list[str]:
    return run("grpo_arithmetic.yaml", run__dir=folder, run__dtype=dtype, parallel=parallel, **{**SMALL, **more})


def curve(folder: Path) -> list[dict[str, float | str]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "tokens_per_second")} for row in rows]


@pytest.mark.parametrize(
    "dtype",
    ["float64", pytest.param("float32", marks=pytest.mark.slow), pytest.param("bfloat16", marks=pytest.mark.slow)],
)
def test_a_stopped_run_continues_the_same_curve(dtype: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    [rows] = run_world(1, train_rows, arguments(whole, dtype))
    assert len(rows) == 8 and curve(whole) == rows
    for number in (2, 4, 6):  # within the warm-up, between the phases, within RL
        stopped = tmp_path / f"stopped{number}"
        cut(whole, stopped, number)
        [later] = run_world(1, train_rows, arguments(stopped, dtype))
        assert later == rows[number:]
        assert curve(stopped) == rows
    # a finished run has nothing left to do
    assert run_world(1, train_rows, arguments(whole, dtype)) == [[]]


def test_another_layout_continues_the_same_curve(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    [rows] = run_world(1, train_rows, arguments(whole, "float64"))
    cut(whole, stopped, 6)
    layout = "{tensor: 2, pipeline: 2, sequence_parallel: true}"
    for later in run_world(4, train_rows, arguments(stopped, "float64", layout)):
        assert [set(row) for row in later] == [set(row) for row in rows[6:]]
        for row, expected in zip(later, rows[6:], strict=True):
            assert row.pop("phase") == "rl"
            assert row == pytest.approx({key: expected[key] for key in row}, rel=1e-8, abs=1e-12)


def test_init_from_starts_with_those_weights(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_world(1, train_rows, arguments(first, "float64"))
    weights = first / "checkpoints" / "step_000004"
    more = {"warmup": "null", "data__examples": "null", "run__init_from": weights, "run__seed": 0}
    [rows] = run_world(1, train_rows, arguments(second, "float64", **more))
    assert rows == curve(first)[4:]


def test_never_starts_anew(tmp_path: Path) -> None:
    [rows] = run_world(1, train_rows, arguments(tmp_path, "float32"))
    assert run_world(1, train_rows, arguments(tmp_path, "float32", run__resume="never")) == [rows]
    assert curve(tmp_path) == rows


def _train_on_a_full_disk(rank: int, given: list[str]) -> None:
    """Files may not grow beyond 30 kB: the first checkpoint cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails with OSError instead
    streams = [os.dup(1), os.dup(2)]  # pytest's files, which may be longer than that already
    with open(os.devnull, "w") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        train_rows(rank, given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        for number, stream in enumerate(streams, start=1):
            os.dup2(stream, number)
            os.close(stream)


@pytest.mark.parametrize("world", [1, 2])
def test_a_failed_save_leaves_no_half_checkpoint(world: int, tmp_path: Path) -> None:
    with pytest.raises(WorldError) as failure:
        run_world(world, _train_on_a_full_disk, arguments(tmp_path, "float32", f"{{tensor: {world}}}"))
    assert sorted(failure.value.errors) == list(range(world))
    for error in failure.value.errors.values():
        assert "could not be written" in error
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run_world(1, train_rows, arguments(tmp_path, "float32"))
    with pytest.raises(WorldError, match="does not fit this run"):
        run_world(1, train_rows, arguments(tmp_path, "float32", model__hidden=64))
    sft = run("sft_arithmetic.yaml", run__dir=tmp_path, model__hidden=32)
    with pytest.raises(WorldError, match="stands in the phase 'rl'; this run has sft"):
        run_world(1, train_rows, sft)
    with pytest.raises(WorldError, match="is no checkpoint"):
        run_world(1, train_rows, arguments(tmp_path / "new", "float32", run__init_from=tmp_path))
