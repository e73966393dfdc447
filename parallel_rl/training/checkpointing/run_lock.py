"""One run writes a folder at a time: the second one says who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch.distributed as dist

from parallel_rl.agreement import on_first_rank, raise_on_all_ranks

_NAME = ".lock"
_LEASE = 120.0  # seconds in which a file server gives back what a dead node held
_LINGER = 30.0  # for a process to end, once its collective has failed
_AGAIN = 5.0  # between two looks at a lock
_CACHED = 60.0  # for which a node may take a new file of another's for not there


@contextlib.contextmanager
def only_run(folder: Path, timeout: float) -> Iterator[None]:
    """Inside, no other run writes the folder; the lock is the first rank's and goes with its process.

    A file system without locks has none. A requeued Slurm job waits for the lock of its last start: that of a dead node, or of
    one that Slurm gave up while its rank still waits in a collective for those that are gone. A folder that was made for the
    lock, and in which nothing was written, goes with it.

    Args:
        timeout: seconds that a rank waits in a collective.

    Raises:
        ValueError: another run has it; which one; or ranks do not share the folder; on all ranks.
        RuntimeError: it cannot be written; on all ranks.
    """
    with contextlib.ExitStack() as held:
        end = time.monotonic() + max(_LEASE, timeout + _LINGER)

        def hold() -> str | None:
            with contextlib.ExitStack() as taken:
                taken.enter_context(_folder(folder))
                other = taken.enter_context(_holding(folder, may_wait=time.monotonic() < end))
                if other is None:
                    held.push(taken.pop_all())
            return other

        # every rank looks again: one that waited in a collective for the first one would end the run
        said = False
        while (other := on_first_rank(hold, f"run.dir = {str(folder)!r} cannot be written")) is not None:
            if dist.get_rank() == 0 and not said:
                print(f"run.dir is still held by this job's last start, {other}; waiting for it to end", flush=True)
            said = True
            time.sleep(_AGAIN)
        held_by = on_first_rank(lambda: _held_by(folder), f"run.dir = {str(folder)!r} cannot be read")
        raise_on_all_ranks(lambda: _check_shared(folder, held_by, min(_CACHED, timeout / 2)))
        yield


def _held_by(folder: Path) -> str | None:
    """The lock's text, None where there is no lock."""
    try:
        return (folder / _NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _check_shared(folder: Path, held_by: str | None, seconds: float) -> None:
    """Refuse a folder in which this rank does not see the lock of the first one: it is another node's own."""
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
    """Inside, the lock is ours; or this job's last start has it, the one that is given, and `may_wait`."""
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
        with contextlib.suppress(OSError):  # a full disk is for the run to tell
            file.truncate(0)
            file.write(f"{who}, since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode())
            os.fsync(file.fileno())  # another node reads it, of a node that may be dead by then
        try:
            yield None
        finally:
            with contextlib.suppress(FileNotFoundError):
                (folder / _NAME).unlink()


def _locked(path: Path) -> FileIO | None:
    """The lock's file, or None where another process has it, or has just removed the file that was opened."""
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
