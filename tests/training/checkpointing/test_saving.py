"""Writing checkpoints under real faults: a full disk, a folder in the way, a kill at any moment leave the last good one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel_rl.testing.pool import run_world
from tests.training.checkpointing.saves import (
    Small,
    arguments,
    can_mount,
    disk,
    largest_file,
    snapshot,
)


def _rank_1_cannot_write(rank: int, given: list[str]) -> None:
    small = Small(given)
    small.save(1)
    before = snapshot(small.folder)
    with pytest.raises(RuntimeError, match=r"step_000002 could not be written.*: rank 1: OSError: .*File too large"):
        if rank == 1:
            with largest_file(2_000):
                small.save(2)
        else:
            small.save(2)
    dist.barrier()
    assert snapshot(small.folder) == before
    small.save(2)  # and the run could go on
    small.save(2)  # the same number again takes the place of the first
    assert small.load() >= {2.0} and len(list(small.folder.iterdir())) == 2


@pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)),
    reason="CPython 3.12.0 and 3.12.1 crash on the BytesIO of a failed write (gh-111049)",
)
def test_a_rank_that_cannot_write_is_named_on_all_ranks(tmp_path: Path) -> None:
    run_world(2, _rank_1_cannot_write, arguments(tmp_path, "{tensor: 2}"))


def _rank_1_loses_its_mount(rank: int, given: list[str], folder: Path) -> None:
    """A run.dir that is not absolute; another working folder stands for another disk."""
    small, here = Small(given), Path.cwd()
    try:
        os.chdir(folder)
        small.save(1)
        os.chdir(folder / "another disk" if rank == 1 else folder)
        with pytest.raises(RuntimeError, match=r"step_000002 could not be written.*: rank 1: OSError: __1_0.distcp, "):
            small.save(2)
        os.chdir(folder)
        assert small.load() == {1.0}
    finally:
        os.chdir(here)


def test_what_a_rank_wrote_to_another_disk_is_missed(tmp_path: Path) -> None:
    """Megatron's writer makes the folder where it is not there: what a node without its mount wrote was not in the checkpoint,
    which passed for whole, and older ones went."""
    (tmp_path / "another disk").mkdir()
    run_world(2, _rank_1_loses_its_mount, arguments(Path("run"), "{tensor: 2}"), tmp_path)


def _cannot_make_rename_or_prune(rank: int, given: list[str]) -> None:
    small, first = Small(given), rank == 0
    if first:
        small.folder.parent.mkdir(parents=True, exist_ok=True)
        small.folder.write_text("a file where the folder should be")
    dist.barrier()
    with pytest.raises(
        RuntimeError, match=r"step_000001 could not be written.*: rank 0: (FileExists|NotADirectory)Error"
    ):
        small.save(1)
    dist.barrier()
    if first:
        small.folder.unlink()
    dist.barrier()
    small.save(1)
    if first:  # the old one cannot be moved out of the way
        (small.folder / ".replaced_step_000001" / "in the way").mkdir(parents=True)
    dist.barrier()
    before = snapshot(small.folder / "step_000001")
    with pytest.raises(RuntimeError, match=r"step_000001 could not be written.*: rank 0: OSError: .*not empty"):
        small.save(1)
    dist.barrier()
    assert snapshot(small.folder / "step_000001") == before
    if first:
        (small.folder / ".pruned_step_000001" / "in the way").mkdir(parents=True)
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"step_000002 is written, but .* could not be removed: rank 0: OSError"):
        small.save(2, newest=1)
    assert small.newest()[0] == small.folder / "step_000002"


def test_a_folder_that_cannot_be_made_renamed_or_removed_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_world(2, _cannot_make_rename_or_prune, arguments(tmp_path, "{tensor: 2}"))


def _on_a_small_disk(rank: int, given: list[str], place: Path) -> list[str]:
    """Saves on a disk of n files, for each n: it fails at mkdir, a shard, the index, the manifest, ..., then it does not."""
    small, causes = Small(given), []
    with disk(place, "size=10m,nr_inodes=3") if rank == 0 else contextlib.nullcontext() as remount:

        def change(options: str) -> None:
            dist.barrier()
            if remount is not None:
                remount(options)
            dist.barrier()

        change("nr_inodes=3")
        with pytest.raises(RuntimeError, match="No space left on device"):
            small.save(1)
        change("nr_inodes=1000")
        small.save(1)
        before, used = snapshot(small.folder), len(list(place.rglob("*"))) + 1
        for more in range(1, 30):
            change(f"nr_inodes={used + more}")
            try:
                small.save(2)
            except RuntimeError as error:
                assert "step_000002 could not be written" in str(error)
                causes.append(str(error).partition("untouched: ")[2])
                change("nr_inodes=1000")
                assert snapshot(small.folder) == before
                assert small.newest()[0] == small.folder / "step_000001"
            else:
                break
        assert small.load() >= {2.0}
        room = (
            shutil.disk_usage(place).used + 20_000
        )  # fewer bytes than a checkpoint takes: refused before one is written
        change(f"nr_inodes=1000,size={room}")
        with pytest.raises(
            RuntimeError, match=r"rank 0: OSError: the disk is full: the checkpoint takes .* and .* are free"
        ):
            small.save(3)
        change("size=10m,ro")
        with pytest.raises(RuntimeError, match=r"rank 0: OSError: .*Read-only file system"):
            small.save(3)
        assert small.load() >= {2.0}
        dist.barrier()
    return causes


@pytest.mark.slow
def test_a_disk_that_fills_up_at_any_file_leaves_the_last_good_one(tmp_path: Path) -> None:
    if not can_mount(tmp_path / "probe"):
        pytest.skip("this user may not mount a file system")
    place = tmp_path / "disk"
    causes, others = run_world(2, _on_a_small_disk, arguments(place, "{tensor: 2}"), place, timeout=300)
    print("\n".join(causes))
    assert causes == others  # every rank says the same
    assert len(causes) >= 6  # the common part, the shards, the index, two small files; older versions' folder, too
    assert any("rank 1" in cause for cause in causes) and all("No space left on device" in cause for cause in causes)


def _begins_anew_on_a_small_disk(rank: int, given: list[str], place: Path) -> tuple[str, int]:
    """A run of another size is refused by the room that there is, one of the same size takes the room of the old one."""
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.trainer import train

    warnings.simplefilter("ignore")
    with disk(place, "size=10m") if rank == 0 else contextlib.nullcontext() as remount:
        dist.barrier()
        Small(given).save(1)
        dist.barrier()
        folder = place / "run"
        if remount is not None:
            (folder / "metrics.jsonl").write_text('{"phase": "sft", "step": 1}\n')
            (folder / "tensorboard").mkdir()
            remount(f"size={shutil.disk_usage(place).used + 50_000}")
        dist.barrier()
        before, again = snapshot(folder), [*given[1:], "--run.resume=never", "--sft.steps=1"]
        with pytest.raises(ValueError) as refused:
            train(load_config(given[0], [*again, "--model.hidden=48"]))
        dist.barrier()
        assert snapshot(folder) == before
        train(load_config(given[0], again))
        dist.barrier()
        assert (folder / "checkpoints" / "step_000001").is_dir()
        dist.barrier()  # the first rank takes the disk away
        return str(refused.value), len(before)


@pytest.mark.slow
def test_there_is_room_before_an_older_run_is_removed(tmp_path: Path) -> None:
    if not can_mount(tmp_path / "probe"):
        pytest.skip("this user may not mount a file system")
    given = arguments(tmp_path / "disk" / "run", evaluation="null", data__held_out="null")
    for text, files in run_world(2, _begins_anew_on_a_small_disk, given, tmp_path / "disk"):
        assert files > 5 and text.startswith(f"run.dir = '{tmp_path}/disk/run': a checkpoint takes ")
        assert re.search(
            r"takes \d+\.\d kB and \d+\.\d kB are free once the run there is removed. Nothing was changed", text
        )


def _read_only(rank: int, given: list[str]) -> None:
    small = Small(given)
    small.save(1)
    small.folder.chmod(0o555)
    with pytest.raises(RuntimeError, match=r"step_000002 could not be written.*: rank 0: PermissionError"):
        small.save(2)
    small.folder.chmod(0o755)
    assert small.load() >= {1.0}


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write anywhere; the disk that is mounted read-only stands for it"
)
def test_a_folder_that_may_not_be_written_is_an_error(tmp_path: Path) -> None:
    run_world(1, _read_only, arguments(tmp_path))


def _save_without_end(given: list[str], seed: int) -> None:
    os.environ.pop("WORLD_SIZE", None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    small = Small(given)
    for number in range(seed * 1000 + 1, seed * 1000 + 1000):
        small.save(number)


def _save_once(rank: int, given: list[str]) -> None:
    Small(given).save(1)


def _newest_values(rank: int, given: list[str]) -> tuple[str, set[float], list[str]]:
    small = Small(given)
    path, said = small.newest()
    assert path is not None
    return path.name, small.load(), said


def _kill_and_look(folder: Path, times: int) -> None:
    given, chosen = arguments(folder), random.Random()
    run_world(1, _save_once, given)  # starts the pool's server, from which the process below is forked
    for number in range(1, times + 1):
        process = multiprocessing.get_context("forkserver").Process(target=_save_without_end, args=(given, number))
        process.start()
        first = folder / "checkpoints" / f"step_{number * 1000 + 1:06d}"
        deadline = time.monotonic() + 300
        while not first.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        after = chosen.uniform(0, 0.5)
        time.sleep(after)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        left = sorted(path.name for path in (folder / "checkpoints").iterdir())
        print(f"killed {after:.3f} s after the first save: {left}")
        [(name, values, _)] = run_world(1, _newest_values, given)
        step = int(name[5:])
        assert step > number * 1000 and step >= max(int(path[5:]) for path in left if path.startswith("step_"))
        assert values == {float(step)}  # whole: all of it from one save
        assert not [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_kills_in_the_middle_of_a_save_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    """Each of four saves is killed in a process of its own."""
    _kill_and_look(tmp_path, 4)
