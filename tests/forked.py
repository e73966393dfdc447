"""Ranks of a job that are forked from the pool's server: the processes of a command without their imports."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from parallel_rl.testing.pool import run_world
from tests.launch import SECONDS


class Ended(NamedTuple):
    """The exit status of each rank, None for one that hung, and what all ranks printed."""

    statuses: list[int | None]
    stdout: str
    stderr: str


class Job:
    """Ranks that run `work(*arguments)` with the variables that torchrun sets; their store is this process's."""

    def __init__(
        self, out: Path, err: Path, work: Callable[..., object], *arguments: object, ranks: int, env: Mapping[str, str]
    ) -> None:
        run_world(1, _nothing)  # starts the server, which imports torch and Megatron
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", **env}
        settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        settings |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        context = multiprocessing.get_context("forkserver")
        self.processes: Sequence[BaseProcess] = [
            context.Process(
                target=_work,
                args=(work, arguments, {**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}, out, err),
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run_ranks(folder: Path, work: Callable[..., object], *arguments: object, ranks: int = 2, **env: str) -> Ended:
    """Run `work(*arguments)` on each rank and wait for all of them; nothing ends a rank because another fails."""
    out, err = folder / "stdout", folder / "stderr"
    job = Job(out, err, work, *arguments, ranks=ranks, env=env)
    try:
        for process in job.processes:
            process.join(SECONDS)
        return Ended([process.exitcode for process in job.processes], out.read_text(), err.read_text())
    finally:
        job.end()


def command(words: list[str]) -> None:
    """Run `parallel-rl WORDS` in this process and exit with its status."""
    from parallel_rl.cli import main

    sys.argv = ["parallel-rl", *words]
    sys.exit(main())


def _nothing(rank: int) -> None:
    pass


def _work(
    work: Callable[..., object], arguments: Sequence[object], settings: Mapping[str, str], out: Path, err: Path
) -> None:
    for number, path in ((1, out), (2, err)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    os.environ.update(settings)
    work(*arguments)
