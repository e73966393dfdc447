"""Ends and removes what a private cluster leaves behind as soon as the process that holds it ends, however that ends.

`Guard` runs this file as a process of its own, which makes the cluster's folder. When the holder closes the pipe between them,
or dies of whatever signal, it ends all processes of the cluster, unmounts what is mounted in the folder and removes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

SECONDS = 60.0  # for all processes to end: killed, but on a busy machine


class Guard:
    """The holder's side.

    Attributes:
        folder: new and empty; a short name: a socket's path ends at 108 characters.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,  # no key of a terminal reaches it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = self._process.stdin
        with self._process.stdout as told:
            name = told.readline().decode().strip()
        if not name:
            raise RuntimeError(f"the cluster's guard ended with {self._process.wait()}")
        self.folder = Path(name)

    def watch(self, process: int) -> None:
        """All that shares the mount namespace of a process goes with the cluster, whatever it calls itself."""
        self._pipe.write(f"{process}\n".encode())
        self._pipe.flush()

    def close(self) -> None:
        """Ends and removes everything now.

        Raises:
            RuntimeError: something is still there.
        """
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait(2 * SECONDS)
        if self._process.returncode or self.folder.exists():
            raise RuntimeError(f"what ran in {self.folder} could not be ended (status {self._process.returncode})")


def space_of(process: int | str) -> int | None:
    """The mount namespace of a process; None where it is gone or nobody's."""
    try:
        return os.stat(f"/proc/{process}/ns/mnt").st_ino
    except OSError:
        return None


def inside(spaces: Iterable[int]) -> list[int]:
    """The processes of these mount namespaces."""
    wanted = set(spaces)
    return [number for number in _processes() if space_of(number) in wanted]


def end(find: Callable[[], list[int]]) -> bool:
    """SIGKILL to the processes that `find` finds until there are none; whether that came to be."""
    limit = time.monotonic() + SECONDS
    while left := find():
        if time.monotonic() > limit:
            return False
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none has time to report another's end
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
        time.sleep(0.05)
    return True


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _of_cluster(folder: Path, spaces: set[int]) -> list[int]:
    """Who was started with the cluster's slurm.conf, and who shares a mount namespace with a node."""
    mark, found = f"SLURM_CONF={folder}/slurm.conf".encode(), []
    for process in _processes():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                found.append(process)
    spaces = (spaces | {space for process in found if (space := space_of(process))}) - {space_of("self")}
    return sorted({*found, *inside(spaces)})


def _unmount(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((place for place in mounts if place.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], check=False)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    holder, folder = os.getppid(), Path(tempfile.mkdtemp(prefix="slurm-"))
    held: dict[int, int] = {}  # kept open: the number of a namespace that is gone is given to the next
    try:
        print(folder, flush=True)
        text = b""
        while os.getppid() == holder:  # a copy of the pipe may live on in a child of the holder
            if not select.select([0], [], [], 0.2)[0]:
                continue
            part = os.read(0, 4096)
            if not part:
                break
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                with contextlib.suppress(OSError):
                    space = os.open(f"/proc/{int(line)}/ns/mnt", os.O_RDONLY)
                    held[os.fstat(space).st_ino] = space
    finally:
        ended = end(lambda: _of_cluster(folder, set(held)))
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main())
