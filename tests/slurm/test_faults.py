"""Whatever happens to a job, nothing is lost: it ends or is queued again with a word on the cause, goes on, and its curve is
bit-equal to that of a run which nothing happened to."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.slurm.case import STEPS, WAIT, Case
from tests.slurm.cluster import Cluster, missing
from tests.slurm.faults import FAULTS, Fault
from tests.slurm.runs import Rows, arguments, checked, curve, submit, words

pytestmark = pytest.mark.slurm
AT_A_TIME = 2 if "PYTEST_XDIST_WORKER" in os.environ else 3  # two beside a process that runs the other Slurm tests
ROUNDS = int(os.environ.get("FAULT_ROUNDS", "1"))  # `make soak`: 3
SEED = int(os.environ.get("FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
ONLY = os.environ.get("FAULTS", "")  # a regular expression for names
WANTED = [fault for fault in FAULTS if re.search(ONLY, fault.name) and (ONLY or ROUNDS > 1 or not fault.held_by)]
CASES = [(fault, number) for number in range(ROUNDS) for fault in WANTED]
SLOW = ("time limit", "a node loses its power", "slurmd is killed", "a rank hangs")
Outcome = dict[str, object]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[str, int], Future[Outcome]]]:
    """Every case, each on a cluster of its own, some at a time: most of it is waiting."""
    if missing():
        pytest.skip(f"no private Slurm: {missing()}")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        calm = pool.submit(_calm)
        # those that wait for Slurm first: others use the time
        order = sorted(CASES, key=lambda case: case[0].name not in SLOW)
        yield {(fault.name, number): pool.submit(_happen, fault, number, calm) for fault, number in order}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault, number", CASES, ids=[f"{fault.name}-{number}" for fault, number in CASES])
def test_nothing_is_lost(
    fault: Fault,
    number: int,
    outcomes: dict[tuple[str, int], Future[Outcome]],
    record_property: Callable[[str, object], None],
) -> None:
    """Takes minutes: each fault is done to a real job, which Slurm must notice, requeue and run to its end."""
    if fault.disk is not None and os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    outcome = outcomes[fault.name, number].result()
    record_property("outcome", json.dumps(outcome))
    if "FAULT_REPORT" in os.environ:
        with open(os.environ["FAULT_REPORT"], "a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")


def _calm() -> Rows:
    """The curve of a run that nothing happens to."""
    with Cluster(nodes=2) as cluster:
        logs, run = cluster.folder / "logs", cluster.disk / "run"
        number = submit(cluster, logs, 2, arguments(run, STEPS, rl__optimizer="{lr: 1e-3}"))
        checked(cluster, number, logs, timeout=WAIT)
        return curve(run)


def _happen(fault: Fault, number: int, calm: Future[Rows]) -> Outcome:
    draw = random.Random(f"{SEED} {fault.name} {number}")
    with Cluster(nodes=3, disk=fault.disk) as cluster:
        case = Case(cluster, draw, fault.timeout, fault.options)
        try:
            return {"fault": fault.name, "FAULT_SEED": SEED, **_one(fault, case, calm)}
        except BaseException as error:
            said = words(case.logs)[-12_000:]
            raise AssertionError(f"{fault.name} ({case.instant}; FAULT_SEED={SEED}): {error}\n{said}") from error


def _one(fault: Fault, case: Case, calm: Future[Rows]) -> Outcome:
    case.start()
    if fault.at:
        case.at_the_start(fault.at)
    else:
        case.at_a_random_instant(fault.first)
    done = case.rows()
    assert done < STEPS, f"the run was done {case.instant}: this process had no turn in time"
    fault.does(case)
    case.release()
    state = case.wait()
    assert re.fullmatch(fault.ends, state), f"{state} in place of {fault.ends}"
    if state != "PENDING":
        case.start()
    checked(case.cluster, case.job, case.logs, timeout=WAIT)
    said = re.search(fault.says, words(case.logs))
    assert said, f"no {fault.says!r} in the logs"
    found, expected = curve(case.run), calm.result()
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert found == expected, "the curve is another"
    return {
        "instant": case.instant,
        "done": done,
        "state": state,
        "ended_after": round(case.seconds, 1),
        "restarts": int(case.cluster.job(case.job)["Restarts"]),
        "said": said[0].replace(f"{case.cluster.disk}/", ""),
    }
