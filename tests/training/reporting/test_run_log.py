"""The record of a run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.reporting import run_log
from parallel_rl.training.reporting.run_log import Row, RunLog, draw_curves, read_metrics
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


def test_a_terminal_has_a_bar_and_a_log_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step of all, time left, reward and loss in both; FORCE_COLOR, which notebooks set, makes no terminal of a pipe."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    output = {}
    for name, (reader, writer) in {"terminal": os.openpty(), "log": os.pipe()}.items():
        with monkeypatch.context() as patched, open(writer, "w") as stdout:
            patched.setattr("sys.stdout", stdout)
            with RunLog(tmp_path / name, "rl", active=True, after=None, loggers=[]) as log:
                log.phase("rl", 20, 0)
                log.step("rl", 1, {"reward": 0.25, "loss": 0.5})
        output[name] = _read_to_the_end(reader)
    for text in output.values():
        assert re.search(
            r"rl step +reward +held-out +loss +left\r?\n.* 1/20 +0.250 +· +0.50000 +\d:\d\d:\d\d", text, re.S
        )
    assert "\x1b" not in output["log"] and "━" not in output["log"]
    assert "━" in output["terminal"] and "/20" in output["terminal"].rpartition("━")[2]


def _read_to_the_end(reader: int) -> str:
    """Read what its closed writer wrote: a terminal gives it in pieces, and an error at the end."""
    text = b""
    with open(reader, "rb", buffering=0) as file, contextlib.suppress(OSError):
        while piece := file.read(4096):
            text += piece
    return text.decode()


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
        (ROWS + "\0\0\0\n", {"warmup": 2, "rl": 3}, "1 2 1 2 3", "the last line was cut off"),
        (ROWS + '{"phase": "r\0\0\n\0', {"warmup": 2, "rl": 3}, "1 2 1 2 3", "the last line was cut off"),
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


FULL = {
    "reward": 0.25, "held_out_reward": 0.5, "loss": 0.5, "kl_penalty": 0.1, "entropy": 1.0, "clip_fraction_low": 0.1,
    "clip_fraction_high": 0.1, "grad_norm": 3.0, "tokens_per_second": 12345.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("width", "left"),
    [
        (160, "reward held-out loss KL entropy clip low clip high grad norm tokens/s"),
        (80, "reward held-out loss KL grad norm"),
        (40, "reward loss"),
        (10, "reward loss"),
    ],
)
def test_a_row_of_the_table_is_one_line_of_the_screen(width: int, left: str, tmp_path: Path) -> None:
    """A wrapped row is no table; the columns that say least go, the others keep their order."""
    log = RunLog(tmp_path, "rl", active=True, after=None)
    log.console = Console(file=(screen := io.StringIO()), force_terminal=False, width=width, highlight=False)
    with log:
        log.phase("rl", 1_000_000, 0)
        log.step("rl", 1, FULL)
        log.step("rl", 2, {name: value for name, value in FULL.items() if name != "held_out_reward"})
    heading, *rows = screen.getvalue().splitlines()
    assert heading.split() == ["rl", "step", *left.split(), "left"]
    assert len(rows) == 2 and all(len(row) == len(heading) for row in rows)
    assert len(heading) <= max(width, 44)


def _events(folder: Path, phase: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard" / phase))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars("loss")]


def test_tensorboard_counts_steps_as_the_rows_do(tmp_path: Path) -> None:
    """Its x was the row's number in the run; and a resumed phase does not take another phase's steps away."""
    pytest.importorskip("tensorboard")
    with RunLog(tmp_path, "rl", active=True, after=None, config={"a": 1}) as log:
        for step in range(1, 6):
            log.step("warmup", step, {"loss": float(step)})
        for step in range(1, 5):
            log.step("rl", step, {"loss": float(step)})
        assert log.files == ("metrics.jsonl", "tensorboard/")
    time.sleep(1.0)  # TensorBoard orders files by the second they begin in, then by a number as text
    with RunLog(tmp_path, "rl", active=True, after={"warmup": 5, "rl": 2}) as log:
        log.step("rl", 3, {"loss": 30.0})
    assert _events(tmp_path, "warmup") == [(step, float(step)) for step in range(1, 6)]
    assert _events(tmp_path, "rl") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_the_axis_of_rewards_holds_the_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was pinned to [0, 1], where a reward of −3 or 40 is not to be seen."""
    from matplotlib.figure import Figure

    seen: list[tuple[float, float]] = []
    save = Figure.savefig

    def note(figure: Figure, path: Path, **options: object) -> None:
        seen.append(figure.axes[0].get_ylim())
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", note)
    rows = [{"phase": "rl", "step": step, "reward": reward} for step, reward in enumerate((-3.0, 10.0, 40.0), 1)]
    assert draw_curves(rows, tmp_path / "curves.png", "a run")
    (low, high) = seen[0]
    assert -6 < low <= -3 and 40 <= high < 44


def test_a_picture_that_cannot_be_written_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"phase": "rl", "step": 1, "reward": 1.0}]
    assert draw_curves(rows, tmp_path / "curves.png", "a run")
    before = snapshot(tmp_path)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(run_log.Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        draw_curves([*rows, {"phase": "rl", "step": 2, "reward": 2.0}], tmp_path / "curves.png", "a run")
    assert snapshot(tmp_path) == before


def _pictures(rank: int, given: list[str]) -> tuple[list[int], bool]:
    """The number of rows of each picture that a run draws where one is due after each step, and whether it has one."""
    from parallel_rl.training import trainer
    from parallel_rl.training.config.load import load_config

    drawn: list[int] = []
    draw = trainer.draw_curves

    def note(rows: Sequence[Row], path: Path, *more: Any) -> bool:
        drawn.append(len(rows))
        if len(rows) == 1:
            raise OSError("No space left on device")  # a run does not end for a picture that the next step draws again
        return draw(rows, path, *more)

    with (
        patch.object(trainer, "draw_curves", note),
        patch.object(trainer, "_DRAW_EVERY", 0.0),
        patch.object(trainer, "_DRAW_SHARE", 0.0),
    ):
        config = load_config(given[0], given[1:])
        trainer.train(config)
    return drawn, (Path(config.run.dir) / "curves.png").is_file()


@pytest.mark.slow
def test_curves_are_drawn_while_the_run_goes_on(tmp_path: Path) -> None:
    """They came with the last step, when nobody needs to look how the run does."""
    given = arguments(tmp_path / "run", sft__steps=3, evaluation="null", data__held_out="null")
    [(drawn, there)] = run_world(1, _pictures, given)
    assert drawn == [1, 2, 3, 3] and there
