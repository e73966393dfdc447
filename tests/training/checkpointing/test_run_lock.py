"""Two runs in one folder: the second is refused before it reads or writes anything there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from io import FileIO
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.checkpointing import run_folder
from tests.launch import UNCOMPILED
from tests.training.checkpointing.saves import arguments, snapshot
from tests.training.helpers import train_rows

HOLD = """
import sys, time
from pathlib import Path
from parallel_rl.training.checkpointing.run_folder import _holding
with _holding(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
SMALL = {"evaluation": "null", "data__held_out": "null", "sft__steps": 1}


@pytest.mark.slow
def test_a_second_run_says_who_holds_the_folder(tmp_path: Path) -> None:
    """Both wrote metrics.jsonl and removed each other's checkpoints. A killed holder leaves nothing that is in the way."""
    folder = tmp_path / "run"
    folder.mkdir()
    env = {**os.environ, "SLURM_JOB_ID": "17", **UNCOMPILED}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        before, given = snapshot(folder), arguments(folder, **SMALL)
        with pytest.raises(WorldError) as failure:
            run_world(2, train_rows, given)
        assert sorted(failure.value.errors) == [0, 1]
        for text in failure.value.errors.values():
            assert f"is being written by job 17 process {holder.pid} on " in text and "Nothing was changed" in text
        assert snapshot(folder) == before
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    assert len(run_world(2, train_rows, given)[0]) == 1
    assert not (folder / ".lock").exists()


def test_a_folder_that_was_made_for_the_lock_goes_with_it(tmp_path: Path) -> None:
    given = [*arguments(tmp_path / "new" / "run", **SMALL), f"--run.init_from={tmp_path / 'nowhere'}"]
    with pytest.raises(WorldError, match="there is no such folder"):
        run_world(1, train_rows, given)
    assert not (tmp_path / "new").exists()


def test_a_requeued_job_waits_for_what_its_last_start_left(tmp_path: Path) -> None:
    """A file server gives back a dead node's lock after its lease; a rank of one that Slurm gave up may be in a collective for
    `run.timeout` yet. The other ranks look again and again, too: in one collective they would end the run."""
    holder = "job 17 process 1 on node1, since yesterday"
    for job, looks, timeout, outcome in [
        (17, 3, 600.0, "has it after 10 s"),
        (
            17,
            None,
            60.0,
            f"written by {holder}. Nothing was changed; wait for it, or choose another run.dir after 120 s",
        ),
        (
            17,
            None,
            600.0,
            f"written by {holder}. Nothing was changed; wait for it, or choose another run.dir after 630 s",
        ),
        (
            18,
            None,
            600.0,
            f"written by {holder}. Nothing was changed; wait for it, or choose another run.dir after 0 s",
        ),
    ]:
        (tmp_path / ".lock").write_text(holder)
        found = run_world(2, _requeued, tmp_path, str(job), looks, timeout)
        assert [each.removeprefix(f"run.dir = {str(tmp_path)!r} is being ") for each in found] == [outcome] * 2


def _requeued(rank: int, folder: Path, job: str, looks: int | None, timeout: float) -> str:
    """What becomes of a start of a job whose lock is let go at a look of the first rank's, and when by the clock."""
    seen, clock = count(1), [0.0]

    def look(path: Path) -> FileIO | None:
        return FileIO("/dev/null", "r+") if next(seen) == looks else None

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    time = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep, strftime=lambda text: text)
    with mock.patch.multiple(run_folder, _locked=look, time=time), mock.patch.dict(os.environ, SLURM_JOB_ID=job):
        try:
            with run_folder.only_run(folder, timeout):
                return f"has it after {clock[0]:g} s"
        except ValueError as error:
            return f"{error} after {clock[0]:g} s"


def _on_a_node_of_its_own(rank: int, given: list[str], folder: Path) -> str:
    """Its working folder stands for its node's disk, on which a run.dir lies that is not absolute."""
    here = Path.cwd()
    os.chdir(folder / f"node {rank}")
    try:
        with mock.patch.object(run_folder, "_CACHED", 0.5), pytest.raises(ValueError, match="share") as refused:
            train_rows(rank, given)
    finally:
        os.chdir(here)
    return str(refused.value)


def test_a_folder_that_the_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    """The run went on to its end, and left each node a part of a checkpoint that none could read."""
    left = tmp_path / "node 1" / "run"  # of a run of that node alone
    left.mkdir(parents=True)
    (left / ".lock").write_text("process 17 on node1, since yesterday")
    (tmp_path / "node 0").mkdir()
    for text in run_world(2, _on_a_node_of_its_own, arguments(Path("run"), **SMALL), tmp_path):
        assert text.startswith("rank 1: run.dir = 'run' is another folder on ") and "than for rank 0" in text
    assert not (tmp_path / "node 0" / "run").exists()
    assert [path.name for path in left.iterdir()] == [".lock"]


def test_a_full_disk_does_not_keep_a_run_from_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run tells how much room it needs; the lock only lacks its holder's name."""
    monkeypatch.setattr(run_folder, "_locked", lambda path: FileIO("/dev/full", "r+"))
    with run_folder._holding(tmp_path):
        pass
