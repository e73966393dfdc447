"""The record of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.reporting.run_log import RunLog, read_metrics
from tests.training.checkpointing.saves import arguments, snapshot
from tests.training.helpers import train_rows


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


def _record(folder: Path, lines: str) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text(lines)
    return path


ROW = '{{"phase": "{}", "step": {}, "loss": 1.0}}\n'
ROWS = "".join(
    ROW.format(phase, step) for phase, step in (("warmup", 1), ("warmup", 2), ("rl", 1), ("rl", 2), ("rl", 3))
)


@pytest.mark.parametrize(
    ("lines", "after", "kept", "said"),
    [
        (ROWS, {"warmup": 2, "rl": 3}, "1 2 1 2 3", None),
        (ROWS + '{"phase": "r', {"warmup": 2, "rl": 3}, "1 2 1 2 3", "the last line was cut off"),
        (ROWS.removesuffix("\n"), {"warmup": 2, "rl": 3}, "1 2 1 2 3", None),  # whole but for its end
        (
            ROWS,
            {"warmup": 2, "rl": 1},
            "1 2 1",
            "the rows of rl step 2-3 are dropped, as they come after the checkpoint",
        ),
        (
            ROWS + '{"',
            {"warmup": 1},
            "1",
            "the last line was cut off; the rows of warmup step 2 are dropped, as they come after the checkpoint; "
            "the rows of rl step 1-3 are dropped, as they come after the checkpoint",
        ),
        (
            ROWS.replace(ROW.format("rl", 2), ""),
            {"warmup": 4, "rl": 3},
            "1 2 1 3",
            "the rows of warmup step 3-4 are missing; the rows of rl step 2 are missing",
        ),
        ("", {"sft": 2}, "", "the rows of sft step 1-2 are missing"),
        (ROWS, {"warmup": 0}, "", "the rows of warmup step 1-2 are dropped"),
        (ROWS + ROW.format("rl", 3), {"warmup": 2, "rl": 3}, "1 2 1 2 3", None),  # each step once
    ],
)
def test_what_a_restart_makes_of_the_rows_is_said_in_a_line(
    lines: str, after: dict[str, int], kept: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _record(tmp_path, lines)
    with RunLog(tmp_path, "rl", active=True, after=after):
        pass
    assert " ".join(str(row["step"]) for row in read_metrics(path)) == kept
    assert path.read_text() == "" or path.read_text().endswith("}\n")
    told = [line for line in capsys.readouterr().out.splitlines() if "metrics.jsonl" in line]
    assert told == [] if said is None else len(told) == 1 and told[0].startswith(f"{path}: {said}")


@pytest.mark.parametrize("damage", ['{"phase": "r\n', "\n", "\0\0\0\n", "[1]\n", '{"phase": "rl"}\n', "\xff\n"])
def test_a_line_that_is_no_row_is_named_on_all_ranks_and_nothing_is_overwritten(damage: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes((ROW.format("sft", 1) + damage + ROW.format("sft", 2)).encode("latin-1"))
    before = snapshot(tmp_path)
    with pytest.raises(WorldError) as refused:
        run_world(2, train_rows, arguments(tmp_path, "{}"))
    for rank in range(2):
        assert refused.value.errors[rank].startswith(f"ValueError: {path}, line 2 is not a row of metrics: ")
    assert snapshot(tmp_path) == before
