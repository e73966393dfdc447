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
# what happens to one run, one after the other: each start is the recovery from one fault and has the next. A node is lost last,
# for the job goes on elsewhere; what a log must say is said by nothing before
IN_A_ROW = (
    ("a rank hangs", "asked to stop", "a node loses its power"),
    ("preemption", "torchrun is killed", "slurmd is killed"),
    ("full disk", "damaged checkpoint"),
)
Outcome = dict[str, object]
Row = tuple[Fault, ...]


def _rows_of_faults() -> list[tuple[Row, int]]:
    """Of `make soak`, and where some are asked for, each fault has a run of its own."""
    if ONLY or ROUNDS > 1:
        return [((fault,), number) for fault, number in CASES]
    named = {fault.name: fault for fault in WANTED}
    assert sorted(named) == sorted(name for row in IN_A_ROW for name in row)
    return [(tuple(named[name] for name in row), 0) for row in IN_A_ROW]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[str, int], Future[dict[str, Outcome]]]]:
    """Every row of faults, each on a cluster of its own, some at a time: most of it is waiting."""
    if missing():
        pytest.skip(f"no private Slurm: {missing()}")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        calm = pool.submit(_calm)
        rows = [(row, number, pool.submit(_happen, row, number, calm)) for row, number in _rows_of_faults()]
        yield {(fault.name, number): future for row, number, future in rows for fault in row}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault, number", CASES, ids=[f"{fault.name}-{number}" for fault, number in CASES])
def test_nothing_is_lost(
    fault: Fault,
    number: int,
    outcomes: dict[tuple[str, int], Future[dict[str, Outcome]]],
    record_property: Callable[[str, object], None],
) -> None:
    """Takes minutes: each fault is done to a real job, which Slurm must notice, requeue and run to its end."""
    if (
        any(other.disk is not None for row, _ in _rows_of_faults() if fault in row for other in row)
        and os.getuid() != 0
    ):
        pytest.skip("only root can mount a small disk")
    outcome = outcomes[fault.name, number].result()[fault.name]
    record_property("outcome", json.dumps(outcome))
    if "FAULT_REPORT" in os.environ:
        with open(os.environ["FAULT_REPORT"], "a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")


def _steps() -> int:
    return STEPS * max(len(row) for row, _ in _rows_of_faults())


def _calm() -> Rows:
    """The curve of a run that nothing happens to."""
    with Cluster(nodes=2) as cluster:
        logs, run = cluster.folder / "logs", cluster.disk / "run"
        number = submit(cluster, logs, 2, arguments(run, _steps(), rl__optimizer="{lr: 1e-3}"))
        checked(cluster, number, logs, timeout=WAIT)
        return curve(run)


def _happen(row: Row, number: int, calm: Future[Rows]) -> dict[str, Outcome]:
    """Do all of a row to one run, which then comes to its end, and give each one's outcome."""
    draw = random.Random(f"{SEED} {row[0].name} {number}")
    with Cluster(nodes=3, disk=next((fault.disk for fault in row if fault.disk), None)) as cluster:
        case, found, fault = Case(cluster, draw, _steps()), dict[str, Outcome](), row[0]
        try:
            for fault, then in zip(row, (*row[1:], row[-1]), strict=True):
                found[fault.name] = {"fault": fault.name, "FAULT_SEED": SEED, **_one(fault, case, then)}
            checked(cluster, case.job, case.logs, timeout=WAIT)
            _assert_same(curve(case.run), calm.result())
        except BaseException as error:
            said = words(case.logs)[-12_000:]
            raise AssertionError(f"{fault.name} ({case.instant}; FAULT_SEED={SEED}): {error}\n{said}") from error
    return found


def _one(fault: Fault, case: Case, then: Fault) -> Outcome:
    """Do it, see the job in the right state and the right words in its logs, and have it started for what happens `then`."""
    if not case.job:
        case.start(fault.timeout, fault.options)
    before = words(case.logs) if case.logs.exists() else ""
    assert not re.search(fault.says, before), f"{fault.says!r} was said before it happened"
    if fault.at:
        case.at_the_start(fault.at)
    else:
        case.at_a_random_instant(fault.first)
    done, job = case.rows(), case.job
    assert done < case.steps, f"the run was done {case.instant}: this process had no turn in time"
    fault.does(case)
    case.release()
    state = case.wait()
    assert re.fullmatch(fault.ends, state), f"{state} in place of {fault.ends}"
    if state != "PENDING":
        case.start(then.timeout, then.options)
    said: list[re.Match[str]] = []

    def is_said() -> bool:
        said[:] = re.finditer(fault.says, words(case.logs))
        return bool(said) or case.ended()

    case.cluster.until(is_said, WAIT, f"{fault.says!r} in the logs")
    assert said, f"no {fault.says!r} in the logs"
    case.forget()
    return {
        "instant": case.instant,
        "done": done,
        "state": state,
        "ended_after": round(case.seconds, 1),
        "restarts": int(case.cluster.job(job)["Restarts"]),
        "said": said[0][0].replace(f"{case.cluster.disk}/", ""),
    }


def _assert_same(found: Rows, expected: Rows) -> None:
    assert [row["step"] for row in found] == list(range(1, _steps() + 1))
    assert found == expected, "the curve is another"
