"""The command under a real torchrun, with the ranks' process ids at hand: for faults that come from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from tests.training.helpers import ROOT

SECONDS = 300.0  # of a machine with much else to do
# where nothing is compiled: Megatron's import asks for the compiler, nearly two seconds of each process
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}


class Run:
    """A run of the command whose ranks are processes of this host: what it prints, and waiting for what it does."""

    folder: Path
    out: Path

    def alive(self) -> bool:
        raise NotImplementedError

    def pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that are there."""
        raise NotImplementedError

    def listens(self, rank: int) -> bool:
        """Return whether a rank has come so far that it remembers SIGUSR1."""
        pid = self.pids().get(rank)
        if pid is None:
            return False
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(status["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1)

    def until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait; fail with the output if the run ends before."""
        end = time.monotonic() + SECONDS
        while not happened():
            assert self.alive(), f"ended before {what}:\n{self.said()}"
            assert time.monotonic() < end, f"waited {SECONDS:g} s for {what}:\n{self.said()}"
            time.sleep(0.01)

    def until_rows(self, count: int) -> None:
        """Wait for that many rows of metrics."""
        path = self.folder / "metrics.jsonl"
        self.until(lambda: path.is_file() and path.read_text().count("\n") >= count, f"row {count}")

    def said(self) -> str:
        """Return all output until now."""
        return self.out.read_text()


class Launch(Run):
    """`torchrun -m parallel_rl.cli train ARGUMENTS` on this host, for the length of a `with` block; nothing of it is left."""

    def __init__(
        self, folder: Path, arguments: list[str], *, ranks: int = 2, env: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.ranks = folder, ranks
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, "-m", *launcher, "-m", "parallel_rl.cli", "train", *arguments]
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **UNCOMPILED}
        # torchrun dies of SIGUSR1 unless it was ignored before; the ranks have a handler of their own
        shell = ["bash", "-c", 'trap "" USR1; exec "$@"', "bash", *command]
        self.out = folder.with_suffix(".out")
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                shell,
                env={**os.environ, **settings, **(env or {})},
                cwd=ROOT,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in [*self.pids().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def pids(self) -> dict[int, int]:
        """Of the ranks that are there."""
        found: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
            if parent == self.process.pid and ranks:
                found[ranks[0]] = int(entry.name)
        return found

    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals, rank: int | None) -> None:
        """A signal to a rank, or to torchrun."""
        os.kill(self.process.pid if rank is None else self.pids()[rank], number)

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(SECONDS)
