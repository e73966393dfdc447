"""What may happen to a job, how each of it is done to a real one, and what must come of it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.runs import arguments, submit

STEPS = 12
RANK = r"python\S* -u -m parallel_rl\.cli train"
AGENT = r"python\S* \S*torchrun\.py"


@dataclass
class Case:
    """One job on two nodes of a cluster of its own, whose nodes share the folder."""

    cluster: Cluster
    folder: Path
    draw: random.Random
    steps: int = STEPS
    job: int = 0
    state: str = ""
    seconds: float = 0.0
    began: float = 0.0  # of time.monotonic(), when it happens
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "disk" / "run"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def start(self, *options: str, **more: object) -> None:
        """`sbatch`, with the same command each time."""
        given = arguments(self.run, self.steps, rl__optimizer="{lr: 1e-3}", run__timeout=15, **more)
        self.job = submit(self.cluster, self.logs, 2, given, *options)

    def rows(self) -> int:
        """Steps in metrics.jsonl now."""
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def at_a_random_instant(self, last: int | None = None) -> None:
        """Waits until some step is done, and a moment of the next."""
        step, moment = self.draw.randint(1, last or self.steps - 4), self.draw.uniform(0.0, 0.5)
        self.cluster.until(lambda: self.rows() >= step or self.ended(), 120, f"step {step}")
        assert not self.ended(), f"the job is {self.cluster.state(self.job)} before anything happened to it"
        time.sleep(moment)
        self.notes.append(f"after step {step} and {moment:.2f} s")
        self.began = time.monotonic()

    def wait(self) -> str:
        """The state that the job comes into by it."""
        if not self.state:
            self.state = self.cluster.wait(self.job, [*ENDED, "PENDING", "REQUEUED"], timeout=120)
            self.seconds = time.monotonic() - self.began
        return self.state

    def ended(self) -> bool:
        return self.cluster.state(self.job) in ENDED

    def kill(self, pattern: str, number: signal.Signals = signal.SIGKILL, node: str = "node2") -> None:
        """A signal to the oldest process of the job on a node whose command line matches."""
        os.kill(self.cluster.processes(self.job, pattern, node)[0], number)


@dataclass(frozen=True)
class Fault:
    """A row of docs/reliability.md.

    Attributes:
        name: what happens. how: how the test does it.
        ends: the state that the job comes into by it, as a regular expression: PENDING is back in the queue by itself.
        says: what stands in the job's logs then, as a regular expression.
        next: what the user does.
    """

    name: str
    how: str
    does: Callable[[Case], None]
    ends: str
    says: str
    next: str = "nothing: the job is queued again and goes on"
    options: tuple[str, ...] = ()
    steps: int = STEPS


AGAIN = "the same `sbatch` again"


def _usr1(case: Case) -> None:
    case.at_a_random_instant()
    case.cluster.run("scancel", "--batch", "--signal=USR1", str(case.job))


def _time_limit(case: Case) -> None:
    case.at_a_random_instant(last=5)
    case.cluster.run("scontrol", "update", f"job={case.job}", "timelimit=10")  # USR1 is due 10 minutes before it
    case.wait()
    case.cluster.run("scontrol", "update", f"job={case.job}", "timelimit=60")  # or its next start would hear the same


def _scancel(case: Case) -> None:
    case.at_a_random_instant()
    case.cluster.run("scancel", str(case.job))


def _preempt(case: Case) -> None:
    case.at_a_random_instant()
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"]
    case.cluster.submit(*urgent)


def _rank(case: Case) -> None:
    case.at_a_random_instant()
    case.kill(RANK)


def _agent(case: Case) -> None:
    case.at_a_random_instant()
    case.kill(AGENT)


def _hang(case: Case) -> None:
    case.at_a_random_instant()
    case.kill(RANK, signal.SIGSTOP)


def _node_down(case: Case) -> None:
    case.at_a_random_instant()
    case.cluster.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")


def _power(case: Case) -> None:
    case.at_a_random_instant()
    case.cluster.kill_node("node2")


def _slurmd(case: Case) -> None:
    case.at_a_random_instant()
    case.cluster.kill_slurmd("node1")
    ranks = [pid for node in case.cluster.nodes for pid in case.cluster.processes(case.job, RANK, node)]
    for pid in ranks:  # the tiny run would be over before Slurm takes note
        os.kill(pid, signal.SIGSTOP)
    case.wait()
    for pid in ranks:  # those of node1, which nobody ended, are now beside the job's next start
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _disk(case: Case) -> None:
    case.at_a_random_instant()
    filler = case.folder / "disk" / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    case.wait()
    filler.unlink()


def _damage(case: Case) -> None:
    _rank(case)
    case.wait()
    newest = max((case.run / "checkpoints").glob("step_*"))
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(case.draw.randrange(largest.stat().st_size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    case.notes.append(f"a bit of {newest.name}/{largest.name} flipped")


FAULTS = (
    Fault(
        "asked to stop",
        "`scancel --batch --signal=USR1 JOB`",
        _usr1,
        "PENDING",
        r"stopped by the file STOP \(rank \d+\) after rl step \d+",
    ),
    Fault(
        "time limit",
        "`scontrol update job=JOB timelimit=10`, with `--signal=B:USR1@600`",
        _time_limit,
        "PENDING",
        r"stopped by the file STOP \(rank \d+\) after rl step \d+",
        options=("--time=60",),
        steps=300,
    ),
    Fault(
        "preemption",
        "a job in a partition of a higher tier, `GraceTime=20`",
        _preempt,
        "PENDING",
        r"stopped by SIGTERM \(rank \d+\) after rl step \d+",
        steps=60,
    ),
    Fault(
        "cancelled", "`scancel JOB`", _scancel, "CANCELLED", r"stopped by SIGTERM \(rank \d+\) after rl step \d+", AGAIN
    ),
    Fault("a rank is killed", "`kill -9` of rank 1", _rank, "FAILED", r"rank 1\b.*(gone|SIGKILL|Signal 9)", AGAIN),
    Fault(
        "torchrun is killed",
        "`kill -9` of node 1's agent",
        _agent,
        "FAILED|PENDING",
        r"rank 1\b.*(agent|gone)|stopped by SIGTERM",
        AGAIN,
    ),
    Fault(
        "a rank hangs",
        "`kill -STOP` of rank 1, `run.timeout = 15`",
        _hang,
        "FAILED",
        r"rank 1 on node2 is MISSING",
        AGAIN,
    ),
    Fault("node set down", "`scontrol update nodename=node2 state=down`", _node_down, "PENDING", r""),
    Fault("a node loses its power", "`kill -9` of all that runs on node2", _power, "PENDING", r"", steps=90),
    Fault("slurmd is killed", "`kill -9` of node1's slurmd, the batch host's", _slurmd, "PENDING", r""),
    Fault(
        "full disk",
        "the run's file system filled to its last byte",
        _disk,
        "FAILED",
        r"No space left on device|free",
        AGAIN,
    ),
    Fault(
        "damaged checkpoint",
        "rank 1 killed, then one bit of the newest checkpoint flipped",
        _damage,
        "FAILED",
        r"rank 1\b",
        AGAIN,
    ),
)
