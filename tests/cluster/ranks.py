"""The command on ranks that are forked from the pool's server: as under torchrun, without the imports of a process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from tests.launch import SECONDS


def _run_command(arguments: list[str], settings: Mapping[str, str], out: Path) -> None:
    from parallel_rl.cli import main

    with out.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ.update(settings)
    sys.argv = ["parallel-rl", "train", *arguments]
    sys.exit(main())


class Ranks:
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

    def listens(self, rank: int) -> bool:
        """Return whether a rank remembers SIGUSR1."""
        lines = Path(f"/proc/{self.processes[rank].pid}/status").read_text().splitlines()
        caught = int(dict(line.split(":", 1) for line in lines)["SigCgt"], 16)
        return bool(caught >> (signal.SIGUSR1 - 1) & 1)

    def send(self, number: signal.Signals, rank: int) -> None:
        os.kill(self.processes[rank].pid or 0, number)

    def until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait; fail with the output if a rank ends before."""
        end = time.monotonic() + SECONDS
        while not happened():
            assert all(process.is_alive() for process in self.processes), f"ended before {what}:\n{self.said()}"
            assert time.monotonic() < end, f"waited {SECONDS:g} s for {what}:\n{self.said()}"
            time.sleep(0.01)

    def until_rows(self, count: int) -> None:
        """Wait for that many rows of metrics."""
        path = self.folder / "metrics.jsonl"
        self.until(lambda: path.is_file() and path.read_text().count("\n") >= count, f"row {count}")

    def wait(self, rank: int) -> int | None:
        """Return the exit status of a rank that ends by itself."""
        self.processes[rank].join(SECONDS)
        return self.processes[rank].exitcode

    def said(self) -> str:
        """Return all output until now."""
        with contextlib.suppress(FileNotFoundError):
            return self.out.read_text()
        return ""
