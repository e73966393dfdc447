"""Loggers beside metrics.jsonl: what each is told, and that none ends a run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.reporting.loggers import Loggers, Row, RunInfo, check_loggers, register_logger, registered
from parallel_rl.training.reporting.run_log import RunLog, read_metrics
from tests.training.checkpointing.saves import arguments, can_mount, disk
from tests.training.helpers import cut, train_rows

OWN = '''
from parallel_rl import register_logger

@register_logger("own_file")
class OwnFile:
    """A logger as a user writes it."""

    def __init__(self, info):
        self.file = open(info.folder / "own.txt", "a")
        print("begin", info.run_id("own", lambda: "first"), info.config["run"]["seed"], info.done, file=self.file)

    def log(self, phase, step, row):
        if step == 2:
            raise OSError("the disk of the tracker is full")
        print(phase, step, sorted(row)[:1], file=self.file)

    def text(self, phase, step, title, text):
        pass

    def close(self):
        print("end", file=self.file, flush=True)
'''


@pytest.fixture
def own(tmp_path: Path) -> Iterator[str]:
    """A module of the user's on the path, as --import finds it in the working folder."""
    (tmp_path / "own_logger.py").write_text(OWN)
    sys.path.append(str(tmp_path))
    yield "own_logger"
    sys.path.remove(str(tmp_path))


def _train(rank: int, modules: list[str], paths: list[str], given: list[str]) -> list[dict[str, float | int | str]]:
    from parallel_rl.cli.runs import import_modules

    sys.path[:] = [*sys.path, *(path for path in paths if path not in sys.path)]
    import_modules(modules)
    return train_rows(rank, given)


def test_a_logger_of_ones_own_gets_config_and_rows_and_never_ends_the_run(own: str, tmp_path: Path) -> None:
    """Registered by --import; its failure at step 2 is one line, and a run that goes on is the same run to it."""
    sft = "{steps: 3, batch_size: 8, optimizer: {lr: 3e-3}}"
    more = {
        "sft": sft,
        "evaluation": "null",
        "data__held_out": "null",
        "run__checkpoint_every": 1,
        "run__keep_checkpoints": 9,
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        if folder == stopped:
            cut(whole, stopped, 2)
        given = arguments(folder, run__loggers="[own_file, tensorboard]", **more)
        [rows, others] = run_world(2, _train, [own], [str(tmp_path)], given)
        assert rows == others and len(rows) == (3 if folder == whole else 1)
    first = ["begin first 0 {'sft': 0}", "sft 1 ['empty_rows']", "sft 3 ['empty_rows']", "end"]
    assert (whole / "own.txt").read_text().splitlines() == first
    again = ["begin first 0 {'sft': 2}", "sft 3 ['empty_rows']", "end"]
    assert (stopped / "own.txt").read_text().splitlines() == [*first, *again]
    assert (whole / "tensorboard" / "sft").is_dir()


def test_the_logger_of_the_page_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "watching.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(code, {})
    said: list[str] = []
    loggers = Loggers(["lines"], RunInfo(tmp_path, {"run": {"seed": 3}}), said.append)
    loggers.log("sft", 1, {"loss": 0.5})
    loggers.text("sft", 1, "samples", "two\nlines")
    loggers.close()
    assert said == [] and (tmp_path / "lines.txt").read_text() == "3 a new run\nsft 1 0.5\ntwo\nlines\n"


class Broken:
    """Every method fails; SystemExit is what a client raises that gives up."""

    def __init__(self, info: RunInfo) -> None:
        if info.config.get("refuses"):
            raise SystemExit("no key")

    def log(self, phase: str, step: int, row: Row) -> None:
        raise ConnectionError("two\nlines")

    text = close = log  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"refuses": True},
            "warning: the logger 'broken' failed; it warns once, and the run continues: SystemExit: no key",
        ),
        ({}, "warning: the logger 'broken' failed; it warns once, and the run continues: ConnectionError: two"),
    ],
)
def test_a_failure_is_said_once(config: Mapping[str, object], line: str, tmp_path: Path) -> None:
    said: list[str] = []
    if "broken" not in registered():
        register_logger("broken")(Broken)
    loggers = Loggers(["broken"], RunInfo(tmp_path, config), said.append)
    for step in (1, 2):
        loggers.log("sft", step, {"loss": 1.0})
    loggers.close()
    assert said == [line]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("[tensorbord]", "logger = 'tensorbord' is not valid; did you mean 'tensorboard'?"),
        ("[tensorboard, tensorboard]", "logger 'tensorboard' is named twice"),
        ("[absent]", "logger 'absent' needs the package no_such_package, which is not installed: pip install"),
    ],
)
def test_loggers_that_cannot_be_made_are_refused_before_the_run(names: str, words: str, tmp_path: Path) -> None:
    if "absent" not in registered():
        register_logger("absent", package="no_such_package")(Broken)
    given = arguments(tmp_path, run__loggers=names)
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        load_config(given[0], given[1:])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_takes_config_rows_and_texts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the real packages, where they are installed, without a server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(name, reason=f"{name} is not part of `make install`")  # reads its variables as it is imported
    check_loggers([name])
    said: list[str] = []
    for done in ({"sft": 0}, {"sft": 2}):  # a new run, and its continuation
        loggers = Loggers([name], RunInfo(tmp_path, {"run": {"seed": 3}, "rl": None}, done), said.append)
        for step in (done["sft"] + 1, done["sft"] + 2):
            loggers.log("sft", step, {"loss": 1.0 / step, "note": "words"})
        loggers.text("sft", 2, "samples", "prompt <1>\nanswer 2")
        loggers.close()
    assert said == []
    if name == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient()
        [experiment] = [each for each in client.search_experiments() if each.name == "parallel_rl"]
        [run] = client.search_runs([experiment.experiment_id])
        assert run.data.params["run.seed"] == "3"
        assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "sft/loss")] == [
            (step, 1.0 / step) for step in (1, 2, 3, 4)
        ]
    else:
        assert any(path.is_file() for path in (tmp_path / name).rglob("*"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_alone_keeps_no_row_from_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its writer fails in a thread of its own, which must neither end the run nor keep its end waiting."""
    pytest.importorskip("tensorboard")
    if not can_mount(tmp_path / "probe"):
        pytest.skip("this user may not mount a file system")
    with disk(tmp_path / "run" / "tensorboard", "size=8k"):
        with RunLog(tmp_path / "run", "sft", active=True, after=None, loggers=["tensorboard"]) as log:
            for step in range(1, 41):
                log.step("sft", step, {f"metric {number}": float(step) for number in range(20)})
        free = shutil.disk_usage(tmp_path / "run" / "tensorboard").free
    assert free == 0, "the disk was never full"
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 41))
    assert capsys.readouterr().out.count("No space left on device") == 1
