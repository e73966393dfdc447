"""The folder of a run: writable and shared on every node, and locked, so that only one run writes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch.distributed as dist

from parallel_rl.agreement import on_first_rank, raise_on_all_ranks


def check_writable(folder: Path) -> None:
    """Raise ValueError if a run's folder cannot be made or written."""
    there = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"run.dir = {str(folder)!r} cannot be written: {there}: {error.strerror}") from None


def check_on_every_node(folder: Path) -> None:
    """Raise ValueError on all ranks if a node cannot write the run's folder, or if it is not shared."""
    if dist.get_world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())):
        return  # one node
    sign, host = on_first_rank(lambda: _leave_sign(folder), f"run.dir = {str(folder)!r} cannot be used")

    def look() -> None:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        mine = socket.gethostname()
        if not (_existing(folder) / sign).exists():
            raise ValueError(
                f"run.dir = {str(folder)!r} is another folder on {mine} than on {host}: a file that {host} wrote is not there; "
                "choose a folder that all nodes share"
            )
        try:
            check_writable(folder)
        except ValueError as error:
            raise ValueError(f"on {mine}, {error}") from None

    try:
        raise_on_all_ranks(look)
    finally:
        if dist.get_rank() == 0:
            (_existing(folder) / sign).unlink(missing_ok=True)


def _leave_sign(folder: Path) -> tuple[str, str]:
    """Write a file into the folder or where it will be; return its name and this host's."""
    check_writable(folder)
    with tempfile.NamedTemporaryFile(dir=_existing(folder), prefix=".run-dir-", delete=False) as file:
        return Path(file.name).name, socket.gethostname()


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists; ValueError if none can be a folder."""
    there = folder.absolute()
    try:
        while not there.exists() and there != there.parent:
            if there.is_symlink():  # to a missing name, or to itself
                raise ValueError(f"run.dir = {str(folder)!r} cannot be made: {there} is a link to a missing path")
            there = there.parent
    except OSError as error:  # a name that is too long
        raise ValueError(f"run.dir = {str(folder)!r} cannot be made: {error.strerror}") from None
    if not there.is_dir():
        raise ValueError(f"run.dir = {str(folder)!r} cannot be made: {there} is not a folder")
    return there


_NAME = ".lock"
_LEASE = 120.0  # seconds until a file server drops the lock of a dead node
_LINGER = 30.0  # seconds for a process to end after its collective failed
_AGAIN = 5.0  # seconds between two attempts
_CACHED = 60.0  # seconds for which a node may not see another node's new file


@contextlib.contextmanager
def only_run(folder: Path, timeout: float) -> Iterator[None]:
    """Hold the folder's lock on the first rank, in a `with` block.

    File systems without locks have none. A requeued Slurm job waits for the lock of its previous start. A folder
    created for the lock is removed again if the run wrote nothing. `timeout` is the seconds that a rank waits in a
    collective. On all ranks, ValueError if another run holds the lock or ranks do not share the folder, RuntimeError if
    it cannot be written.
    """
    with contextlib.ExitStack() as held:
        end = time.monotonic() + max(_LEASE, timeout + _LINGER)

        def hold() -> str | None:
            with contextlib.ExitStack() as locks:
                locks.enter_context(_folder(folder))
                other = locks.enter_context(_holding(folder, may_wait=time.monotonic() < end))
                if other is None:
                    held.push(locks.pop_all())
            return other

        # every rank polls: a collective with the first rank would time out
        printed = False
        while (other := on_first_rank(hold, f"run.dir = {str(folder)!r} cannot be written")) is not None:
            if dist.get_rank() == 0 and not printed:
                print(f"this job's last start still holds run.dir, {other}; waiting for it to end", flush=True)
            printed = True
            time.sleep(_AGAIN)
        held_by = on_first_rank(lambda: _held_by(folder), f"run.dir = {str(folder)!r} cannot be read")
        raise_on_all_ranks(lambda: _check_shared(folder, held_by, min(_CACHED, timeout / 2)))
        yield


def _held_by(folder: Path) -> str | None:
    try:
        return (folder / _NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _check_shared(folder: Path, held_by: str | None, seconds: float) -> None:
    """Refuse a folder in which this rank does not see the first rank's lock: nodes do not share it."""
    end = time.monotonic() + seconds
    while _held_by(folder) != held_by:
        if time.monotonic() > end:
            raise ValueError(
                f"run.dir = {str(folder)!r} is another folder on {socket.gethostname()} than for rank 0, and each rank writes "
                "its part of a checkpoint there; name one that all nodes share"
            )
        time.sleep(1.0)


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty
            for path in new:
                path.rmdir()


@contextlib.contextmanager
def _holding(folder: Path, *, may_wait: bool = False) -> Iterator[str | None]:
    """Hold the lock in a `with` block; with `may_wait`, wait for this job's last start."""
    job = os.environ.get("SLURM_JOB_ID", "")
    while (file := _locked(folder / _NAME)) is None:
        holder = _held_by(folder)
        if holder is None:
            continue
        if may_wait and job and holder.startswith(f"job {job} "):
            yield holder
            return
        raise ValueError(
            f"run.dir = {str(folder)!r} is being written by {holder or 'another process'}. Nothing was changed; wait for it, "
            "or choose another run.dir"
        )
    with file:
        who = f"{f'job {job} ' if job else ''}process {os.getpid()} on {socket.gethostname()}"
        with contextlib.suppress(OSError):  # the run reports a full disk
            file.truncate(0)
            file.write(f"{who}, since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode())
            os.fsync(file.fileno())  # another node reads it after this one died
        try:
            yield None
        finally:
            with contextlib.suppress(FileNotFoundError):
                (folder / _NAME).unlink()


def _locked(path: Path) -> FileIO | None:
    """Return the locked file, or None if another process holds or has just removed it."""
    file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        return file
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()
    return None
