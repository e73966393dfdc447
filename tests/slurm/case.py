"""One job of the fault tests, held at the instant at which something shall happen to it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.runs import arguments, submit

STEPS = 14
WAIT = 900.0  # seconds, for a busy machine
CHECK = r"^\S*python\S* -m parallel_rl\.cli check"
RANK = r"python\S* -u -m parallel_rl\.cli train"


@dataclass
class Case:
    """One run on node1 and node2 of a cluster of its own with a node to spare; after a job that failed, another goes on."""

    cluster: Cluster
    draw: random.Random
    steps: int = STEPS
    job: int = 0
    state: str = ""
    seconds: float = 0.0
    began: float = 0.0  # of time.monotonic(), when it happens
    instant: str = ""
    held: dict[str, int] = field(default_factory=dict)  # the rank of each node

    @property
    def run(self) -> Path:
        return self.cluster.disk / "run"

    @property
    def logs(self) -> Path:
        return self.cluster.folder / "logs"

    def start(self, timeout: int, options: Sequence[str]) -> None:
        """`sbatch`; in the run's own `timeout` the ranks may be held."""
        given = arguments(self.run, self.steps, rl__optimizer="{lr: 1e-3}", run__timeout=timeout)
        self.job = submit(self.cluster, self.logs, 2, given, *options, env={"GATE_SECONDS": "300"})

    def rows(self) -> int:
        """Steps in metrics.jsonl now."""
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def ranks(self) -> dict[str, int]:
        """The process of the rank on each node, where there is one."""
        found = {node: self.cluster.processes(self.job, RANK, node) for node in ("node1", "node2")}
        return {node: processes[0] for node, processes in found.items() if processes}

    def at_a_random_instant(self, first: int) -> None:
        """Holds the ranks some moment after some further step, the `first` or a later one."""
        step, moment = self.rows() + self.draw.randint(first, STEPS // 2), self.draw.uniform(0.0, 0.5)
        self.instant = f"{moment:.2f} s after step {step}"
        self.cluster.until(lambda: len(self.ranks()) == 2 or self.ended(), WAIT, "its ranks")
        ranks = self.ranks()
        assert len(ranks) == 2, f"the job is {self.cluster.state(self.job)} before its ranks started"
        there = [Path(f"/proc/{rank}") for rank in ranks.values()]
        # nothing slow in here: it has only so many steps
        self.cluster.until(
            lambda: self.rows() >= step or not all(path.exists() for path in there), WAIT, f"step {step}", every=0.02
        )
        assert self.rows() >= step, f"the job is {self.cluster.state(self.job)} before anything happened to it"
        time.sleep(moment)
        self.held = ranks
        for rank in ranks.values():
            os.kill(rank, signal.SIGSTOP)
        self.began = time.monotonic()

    def at_the_start(self, what: str) -> None:
        """Holds what checks the config on node1, or the rank there, for which that of node2 then waits at the gate."""
        least, pattern = (0.0, CHECK) if what == "check" else (6.0, RANK)
        moment, found = least + self.draw.uniform(0.0, 2.0), list[int]()

        def there() -> bool:
            found[:] = self.cluster.processes(self.job, pattern, "node1")
            return bool(found) or self.ended()

        self.cluster.until(there, WAIT, f"its {what}", every=0.05)
        assert found, f"the job is {self.cluster.state(self.job)} before its {what}"
        self.instant = f"{moment:.2f} s after its {what} began"
        if what == "check":
            time.sleep(moment)
        self.held = {"node1": found[-1]}
        os.kill(found[-1], signal.SIGSTOP)
        if what == "gate":
            self.cluster.until(lambda: len(self.ranks()) == 2, WAIT, "the rank of node2")
            time.sleep(moment)
        self.began = time.monotonic()

    def release(self) -> None:
        """The held ranks that are still there go on."""
        for rank in self.held.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGCONT)
        self.held = {}

    def until_told(self, number: signal.Signals) -> None:
        """Until a signal waits for each held rank, or Slurm has let it go on."""
        self.cluster.until(lambda: all(_told(rank, number) for rank in self.held.values()), WAIT, number.name)

    def until_asked(self) -> None:
        """Until the batch script has heard USR1 and left word for the ranks."""
        self.cluster.until((self.logs / str(self.job) / "STOP").exists, WAIT, "the file STOP")

    def wait(self) -> str:
        """The state that the job comes into by it."""
        if not self.state:
            self.state = self.cluster.wait(self.job, [*ENDED, "PENDING", "REQUEUED"], timeout=WAIT)
            self.seconds = time.monotonic() - self.began
        return self.state

    def forget(self) -> None:
        """Something else may happen to the run."""
        self.state = ""

    def ended(self) -> bool:
        return self.cluster.state(self.job) in ENDED


def _told(process: int, number: signal.Signals) -> bool:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return True
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    waiting = int(status["ShdPnd"], 16) | int(status["SigPnd"], 16)
    return not status["State"].startswith("T") or bool(waiting >> (number - 1) & 1)
