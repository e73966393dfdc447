"""Whatever happens to a job, nothing is lost: it ends or is queued again with a word on the cause, goes on, and its curve is
bit-equal to that of a run which nothing happened to."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.faults import FAULTS, Case, Fault
from tests.slurm.runs import Rows, arguments, checked, curve, submit, words

pytestmark = pytest.mark.slurm
AT_A_TIME = 3
ROUNDS = int(os.environ.get("FAULT_ROUNDS", "1"))  # `make soak`: 3
SEED = int(os.environ.get("FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
ONLY = os.environ.get("FAULTS", "")  # a regular expression for names
CASES = [(fault, number) for number in range(ROUNDS) for fault in FAULTS if re.search(ONLY, fault.name)]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[str, int], Future[dict[str, object]]]]:
    """Every case, each on a cluster of its own, some at a time: most of it is waiting."""
    if missing():
        pytest.skip(f"no private Slurm: {missing()}")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        calm = pool.submit(_calm)
        yield {(fault.name, number): pool.submit(_happen, fault, number, calm) for fault, number in CASES}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault, number", CASES, ids=[f"{fault.name}-{number}" for fault, number in CASES])
def test_nothing_is_lost(fault: Fault, number: int, outcomes: dict[tuple[str, int], Future[dict[str, object]]]) -> None:
    if fault.name == "full disk" and os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    outcome = outcomes[fault.name, number].result(timeout=900)
    print(json.dumps(outcome))
    if "FAULT_REPORT" in os.environ:
        with open(os.environ["FAULT_REPORT"], "a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")


def _calm() -> Rows:
    """The curve of a run that nothing happens to, as long as the longest."""
    with _folder(False) as folder, Cluster(nodes=2) as cluster:
        steps = max(fault.steps for fault, _ in CASES)
        number = submit(cluster, folder / "logs", 2, arguments(folder / "run", steps, rl__optimizer="{lr: 1e-3}"))
        checked(cluster, number, folder / "logs", timeout=300)
        return curve(folder / "run")


def _happen(fault: Fault, number: int, calm: Future[Rows]) -> dict[str, object]:
    draw = random.Random(f"{SEED} {fault.name} {number}")
    with _folder(fault.name == "full disk") as folder, Cluster(nodes=2) as cluster:
        case = Case(cluster, folder, draw, fault.steps)
        try:
            return {"fault": fault.name, "seed": SEED, **_one(fault, case, calm), "instant": "; ".join(case.notes)}
        except BaseException as error:
            said = words(case.logs)[-12_000:]
            raise AssertionError(
                f"{fault.name} ({'; '.join(case.notes)}; FAULT_SEED={SEED}): {error}\n{said}"
            ) from error


def _one(fault: Fault, case: Case, calm: Future[Rows]) -> dict[str, object]:
    case.start(*fault.options)
    fault.does(case)
    state, done = case.wait(), case.rows()
    assert re.fullmatch(fault.ends, state), f"{state} in place of {fault.ends}"
    assert done < fault.steps, "it was too late: the run was done"
    assert re.search(fault.says, words(case.logs)), f"no {fault.says!r} in the logs"
    for node in case.cluster.nodes:
        if case.cluster.node_states().get(node, "").startswith("DOWN"):
            case.cluster.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        case.cluster.revive(node)
    if state != "PENDING":
        case.start()
    checked(case.cluster, case.job, case.logs, timeout=300)
    found, expected = curve(case.run), calm.result()[: fault.steps]
    assert [row["step"] for row in found] == list(range(1, fault.steps + 1))
    assert found == expected, "the curve is another"
    restarts = int(case.cluster.job(case.job)["Restarts"])
    return {"ended_after": round(case.seconds, 1), "state": state, "restarts": restarts, "done": done}


@contextlib.contextmanager
def _folder(small_disk: bool) -> Iterator[Path]:
    """A folder whose subfolder `disk` is the run's; the logs are beside it."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        disk = Path(name) / "disk"
        disk.mkdir()
        if not small_disk:
            yield Path(name)
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)
