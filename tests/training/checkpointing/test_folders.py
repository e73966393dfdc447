"""Folders of checkpoints: which are pruned, and what a kill left of one."""

from __future__ import annotations

import fcntl
import shutil
import threading
from pathlib import Path

import pytest

from parallel_rl.training.checkpointing import storage
from parallel_rl.training.checkpointing.manifest import MANIFEST
from parallel_rl.training.checkpointing.storage import Retention


def _folder(path: Path, steps: dict[int, int]) -> Path:
    """Checkpoints by their numbers, each with a manifest that says its step in its phase."""
    from parallel_rl.training.checkpointing.manifest import CheckpointMetadata, Manifest, checksum, write_manifest
    from parallel_rl.training.session import TrainProgress

    for number, step in steps.items():
        final = storage.path_of(path, number)
        final.mkdir(parents=True)
        (final / "common.pt").write_bytes(b"")
        files = {"common.pt": checksum(final / "common.pt")}
        write_manifest(final, Manifest(CheckpointMetadata(TrainProgress("rl", step), {}, {}, {}, ()), files))
    return path


def test_pruning_keeps_the_newest_and_every_mth_and_what_is_being_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {10 + step: step for step in range(1, 10)})
    with storage.reading(folder / "step_000012"):
        storage.prune(folder, Retention(2, 4), folder / "step_000019")
    assert [path.name for path in storage.list_checkpoints(folder)] == [f"step_0000{n}" for n in (12, 14, 18, 19)]
    storage.prune(folder, Retention(1), folder / "step_000014")  # just written, though not the newest by its number
    assert [path.name for path in storage.list_checkpoints(folder)] == ["step_000014", "step_000019"]
    with open(folder / "step_000014" / MANIFEST, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # free: no lock was left behind


def test_a_slow_removal_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for the first one's pruning: on a slow disk longer than for any collective."""
    folder, remove, go = _folder(tmp_path, {1: 1, 2: 2}), shutil.rmtree, threading.Event()
    monkeypatch.setattr(storage.shutil, "rmtree", lambda path: go.wait(60) and remove(path))
    monkeypatch.setattr(storage, "_PATIENCE", 0.1)
    storage.prune(folder, Retention(1), folder / "step_000002")
    assert [path.name for path in storage.list_checkpoints(folder)] == ["step_000002"]
    assert (folder / ".pruned_step_000001").exists()
    go.set()
    [removal] = [thread for thread in threading.enumerate() if thread.name == "prune"]
    removal.join(60)
    assert [path.name for path in folder.iterdir()] == ["step_000002"]


def test_what_a_kill_left_is_cleared_up_and_said(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {1: 1, 2: 2})
    (folder / ".partial_step_000003").mkdir()
    (folder / ".pruned_step_000000").mkdir()
    (folder / "step_000002").rename(folder / ".replaced_step_000002")
    said = storage.clean_up(folder)
    assert len(said) == 2 and "step_000003: its save was interrupted" in said[0] and "step_000002" in said[1]
    assert sorted(path.name for path in folder.iterdir()) == ["step_000001", "step_000002"]
    assert storage.clean_up(folder) == []
