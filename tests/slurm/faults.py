"""What may happen to a job, how each of it is done to a real one, and what must come of it.

At its instant the ranks are held (SIGSTOP), and go on as soon as the fault has reached them: however fast the run is, and
however slow Slurm, it happens at that instant and not later.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from tests.slurm.case import Case
from tests.slurm.runs import words

AGENT = r"python\S* \S*torchrun\.py"


@dataclass(frozen=True)
class Fault:
    """A row of docs/reliability.md.

    Attributes:
        name: what happens. how: how the test does it.
        does: it, to a job whose ranks are held; it ends when it has reached them.
        ends: the state that the job comes into by it, as a regular expression: PENDING is back in the queue by itself.
        says: what stands in the job's logs then, as a regular expression: who, and the cause.
        options: of sbatch. timeout: run.timeout. disk: MB of the run's own file system.
        at: the check of the config or the gate before the first step, in place of a random instant of the run.
        first: the step that it may happen after, or after a later one.
        held_by: what else shows it in `make test-slurm`, where there is something; `make soak` does it all the same.
    """

    name: str
    how: str
    does: Callable[[Case], None]
    ends: str
    says: str
    options: tuple[str, ...] = ()
    timeout: int = 300
    disk: int | None = None
    at: str = ""
    first: int = 1
    held_by: str = ""


def _usr1(case: Case) -> None:
    case.cluster.run("scancel", "--batch", "--signal=USR1", str(case.job))
    case.until_asked()


def _time_limit(case: Case) -> None:
    case.cluster.run("scontrol", "update", f"job={case.job}", "timelimit=10")  # USR1 is due 10 minutes before it
    case.until_asked()
    case.cluster.run("scontrol", "update", f"job={case.job}", "timelimit=60")  # or its next start would hear the same


def _rank_at_the_gate(case: Case) -> None:
    os.kill(case.ranks()["node2"], signal.SIGKILL)


def _scancel(case: Case) -> None:
    case.cluster.run("scancel", str(case.job))
    case.until_told(signal.SIGTERM)


def _preempt(case: Case) -> None:
    size = f"--nodes={len(case.cluster.nodes)}"
    case.cluster.submit("--partition=urgent", size, "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    case.until_told(signal.SIGTERM)


def _rank(case: Case) -> None:
    os.kill(case.held.pop("node2"), signal.SIGKILL)


def _agent(case: Case) -> None:
    os.kill(case.cluster.processes(case.job, AGENT, "node2")[0], signal.SIGKILL)


def _hang(case: Case) -> None:
    case.held.pop("node2")  # nobody lets it go on


def _node_down(case: Case) -> None:
    case.cluster.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    case.wait()


def _power(case: Case) -> None:
    case.cluster.kill_node("node2")
    case.wait()


def _slurmd(case: Case) -> None:
    """What ran on node1, which nobody ends, stays beside the job's next start: its ranks, and an agent that keeps its port."""
    os.kill(case.cluster.processes(case.job, AGENT, "node1")[0], signal.SIGSTOP)
    case.cluster.kill_slurmd("node1")
    case.wait()


def _disk(case: Case) -> None:
    filler = case.cluster.disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    case.release()
    case.wait()
    filler.unlink()


def _damage(case: Case) -> None:
    _rank(case)
    case.release()
    case.wait()
    assert "rank 1 was killed by SIGKILL" in words(case.logs)
    newest = max((case.run / "checkpoints").glob("step_*"))
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(case.draw.randrange(largest.stat().st_size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    case.instant += f"; a bit of {newest.name}/{largest.name} flipped"


_SAVED = r"\(rank \d+\) after rl step \d+"
_DOWN = r"restart \d of job \d+: .*down now: {} \(down\*?\)"

FAULTS = (
    Fault(
        "asked to stop",
        "`scancel --batch --signal=USR1 JOB`",
        _usr1,
        "PENDING",
        rf"stopped by the file STOP {_SAVED}",
    ),
    Fault(
        "asked to stop during the check",
        "the same, while one process checks config and files",
        _usr1,
        "PENDING",
        r"queued again: stopped before its ranks started",
        at="check",
        held_by="test_restarts, which asks at three instants of the start",
    ),
    Fault(
        "a rank is killed at the gate",
        "`kill -9` of rank 1, which waits for rank 0",
        _rank_at_the_gate,
        "FAILED",
        r"rank 1 was killed by SIGKILL",
        at="gate",
        held_by="test_scripts, where a rank dies at the start",
    ),
    Fault(
        "time limit",
        "`scontrol update job=JOB timelimit=10`, with `--signal=B:USR1@600`",
        _time_limit,
        "PENDING",
        rf"stopped by the file STOP {_SAVED}",
        options=("--time=60",),
        held_by="asked to stop: the same signal; Slurm sends it in test_restarts",
    ),
    Fault(
        "preemption",
        "a job in a partition of a higher tier, `GraceTime=60`",
        _preempt,
        "PENDING",
        rf"stopped by SIGTERM {_SAVED}",
    ),
    Fault(
        "cancelled",
        "`scancel JOB`",
        _scancel,
        "CANCELLED",
        rf"stopped by SIGTERM {_SAVED}",
        held_by="preemption: the same signal; test_restarts cancels",
    ),
    Fault(
        "a rank is killed",
        "`kill -9` of rank 1",
        _rank,
        "FAILED",
        r"rank 1 was killed by SIGKILL",
        held_by="damaged checkpoint, which begins with it",
    ),
    Fault(
        "torchrun is killed",
        "`kill -9` of node2's agent",
        _agent,
        "FAILED|PENDING",  # PENDING where the other ranks had time to save when Slurm ended the step
        r"node2: task 1: Killed",
    ),
    Fault(
        "a rank hangs",
        "`kill -STOP` of rank 1, `run.timeout = 30`",
        _hang,
        "FAILED",
        r"rank 1 on node2 is MISSING",
        timeout=30,
    ),
    Fault(
        "node set down",
        "`scontrol update nodename=node2 state=down`",
        _node_down,
        "PENDING",
        _DOWN.format("node2"),
        held_by="a node loses its power; test_restarts sets one down",
    ),
    Fault("a node loses its power", "`kill -9` of all that runs on node2", _power, "PENDING", _DOWN.format("node2")),
    Fault(
        "slurmd is killed",
        "`kill -9` of node1's slurmd, the batch host's",
        _slurmd,
        "PENDING",
        _DOWN.format("node1"),
    ),
    Fault(
        "full disk",
        "the run's file system filled to its last byte",
        _disk,
        "FAILED",
        r"parallel-rl: error \(rank \d+, rl step \d+\): .*(No space left on device|are free)",
        disk=12,
    ),
    Fault(
        "damaged checkpoint",
        "rank 1 killed, then one bit of the newest checkpoint flipped",
        _damage,
        "FAILED",
        r"is damaged: .*; set aside as \S+, step_\d+ is used instead",
        first=3,  # two checkpoints are there: of the only one there is nothing to take instead
    ),
)
