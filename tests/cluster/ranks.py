"""A run on ranks that are forked from the pool's server, which a test sends signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.forked import Job, command
from tests.launch import SECONDS, Run


class Ranks(Run):
    """`parallel-rl train ARGUMENTS` on ranks whose store is this process's, for the length of a `with` block."""

    def __init__(self, folder: Path, arguments: list[str], *, ranks: int = 2, env: Mapping[str, str]) -> None:
        self.folder, self.out = folder, folder.with_suffix(".out")
        self.out.touch()
        self._job = Job(self.out, self.out, command, ["train", *arguments], ranks=ranks, env=env)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.end()

    def alive(self) -> bool:
        return all(process.is_alive() for process in self._job.processes)

    def pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that are there."""
        processes = enumerate(self._job.processes)
        return {rank: process.pid for rank, process in processes if process.pid and process.is_alive()}

    def send(self, number: signal.Signals, rank: int) -> None:
        os.kill(self.pids()[rank], number)

    def wait(self, rank: int) -> int | None:
        """Return the exit status of a rank that ends by itself."""
        self._job.processes[rank].join(SECONDS)
        return self._job.processes[rank].exitcode
