"""Two runs in one folder: the second is refused before it reads or writes anything there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.checkpointing import run_lock
from tests.training.checkpointing.saves import arguments, snapshot
from tests.training.helpers import train_rows

HOLD = """
import sys, time
from pathlib import Path
from parallel_rl.training.checkpointing.run_lock import _holding
with _holding(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
SMALL = {"evaluation": "null", "data__held_out": "null", "sft__steps": 1}


def test_a_second_run_says_who_holds_the_folder(tmp_path: Path) -> None:
    """Both wrote metrics.jsonl and removed each other's checkpoints. A killed holder leaves nothing that is in the way."""
    folder = tmp_path / "run"
    folder.mkdir()
    env = {**os.environ, "SLURM_JOB_ID": "17"}
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


def test_a_requeued_job_waits_for_what_its_last_start_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server gives back the lock of a node that lost its power only after its lease."""
    looks = iter([None, None, run_lock._locked(tmp_path / "other")])
    (tmp_path / ".lock").write_text("job 17 process 1 on node1, since yesterday")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(run_lock, "_locked", lambda path: next(looks))
    with run_lock._holding(tmp_path):
        pass
    (tmp_path / ".lock").write_text("job 18 process 1 on node1, since yesterday")
    monkeypatch.setattr(run_lock, "_locked", lambda path: None)
    with pytest.raises(ValueError, match="job 18 process 1 on node1"), run_lock._holding(tmp_path):
        pass


def test_a_full_disk_does_not_keep_a_run_from_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run tells how much room it needs; the lock only lacks its holder's name."""
    monkeypatch.setattr(run_lock, "_locked", lambda path: FileIO("/dev/full", "r+"))
    with run_lock._holding(tmp_path):
        pass
