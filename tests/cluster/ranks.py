"""The command on ranks that are forked from the pool's server: as under torchrun, without the imports of a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from tests.launch import SECONDS, Run


def _run_command(arguments: list[str], settings: Mapping[str, str], out: Path) -> None:
    from parallel_rl.cli import main

    with out.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ.update(settings)
    sys.argv = ["parallel-rl", "train", *arguments]
    sys.exit(main())


class Ranks(Run):
    """`parallel-rl train ARGUMENTS` on ranks whose store is this process's, for the length of a `with` block.

    The pool must have run before: its server has imported torch and Megatron.
    """

    def __init__(self, folder: Path, arguments: list[str], *, ranks: int = 2, env: Mapping[str, str]) -> None:
        self.folder, self.out = folder, folder.with_suffix(".out")
        self.out.touch()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", **env}
        settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        settings |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        context = multiprocessing.get_context("forkserver")
        self.processes = [
            context.Process(
                target=_run_command,
                args=(arguments, {**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}, self.out),
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that are there."""
        return {rank: process.pid for rank, process in enumerate(self.processes) if process.pid and process.is_alive()}

    def send(self, number: signal.Signals, rank: int) -> None:
        os.kill(self.pids()[rank], number)

    def wait(self, rank: int) -> int | None:
        """Return the exit status of a rank that ends by itself."""
        self.processes[rank].join(SECONDS)
        return self.processes[rank].exitcode
