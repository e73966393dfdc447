"""The record of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.training.logging import RunLog, read_metrics


def test_a_start_that_was_given_up_writes_nothing_into_the_next_one_s_record(tmp_path: Path) -> None:
    old = RunLog(tmp_path, "sft", active=True, after=None)
    old.step("sft", 1, {"loss": 1.0})
    old.step("sft", 2, {"loss": 2.0})
    new = RunLog(tmp_path, "sft", active=True, after={"sft": 1})
    with pytest.raises(RuntimeError, match="another start of this run has taken over"):
        old.step("sft", 3, {"loss": 3.0})
    new.step("sft", 2, {"loss": 20.0})
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 20.0)]
    for log in (old, new):
        log.__exit__(None, None, None)
