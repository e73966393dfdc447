"""slurm/with_server.sbatch: rollout servers on nodes of their own start, end and are started again with the job."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.servers.engine_server import EngineServer, serve_engine
from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.runs import alone, arguments, checked, curve, last_line, submit, words

pytestmark = pytest.mark.slurm
WAIT = 200.0  # seconds, for a busy machine
STEPS = 16
SERVER = r"tests\.servers\.engine_server"
LLAMA = {"model__position": "rope", "model__gated": "true", "model__heads": 2}


def given(run: Path, steps: int = STEPS, url: str = "http://127.0.0.1:1") -> list[str]:
    """A run that is kept in step with servers, whose address the job gives it."""
    server = f"{{url: '{url}', model: tiny, update: vllm, max_mismatch: null, concurrency: 1}}"
    more = {"data": "{train: configs/data/arithmetic_train.jsonl}", "rl__server": server, "rl__group_size": 4}
    own = ["--import", "tests.training.helpers"]
    return [*arguments(run, steps, reward="long_answers", run__dtype="float64", **LLAMA, **more), *own]


def settings(seconds: float = 0.05, restarts: int = 1) -> dict[str, str]:
    command = f"{sys.executable} -m tests.servers.engine_server $HOST $PORT {seconds}"
    return {"SERVER_COMMAND": command, "SERVER_RESTARTS": str(restarts)}


def _rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def _until(cluster: Cluster, number: int, run: Path, step: int) -> None:
    """Until a run is so far."""

    def far() -> bool:
        assert cluster.state(number) not in ENDED, words(run.parent)
        return _rows(run) >= step

    cluster.until(far, WAIT, f"step {step}")


def _kill(cluster: Cluster, number: int, known: int) -> int:
    """SIGKILL to the job's server, once there is another than that."""
    found: list[int] = []

    def there() -> bool:
        assert cluster.state(number) not in ENDED
        found[:] = cluster.processes(number, SERVER)
        return bool(found) and found[-1] != known

    cluster.until(there, WAIT, "the server")
    os.kill(found[-1], signal.SIGKILL)
    return found[-1]


def test_a_server_that_is_killed_is_started_again_and_then_the_job_is(cluster: Cluster, tmp_path: Path) -> None:
    """The run waits, gives the new server its weights, is queued again where none is left, and comes to the same numbers.

    Takes a minute: one job of two nodes and a server's that starts its ranks twice; beside it one that is cancelled.
    """
    run, logs = tmp_path / "run", tmp_path / "logs"
    number = submit(cluster, logs, 1, given(run), env=settings(), servers=1)
    other = submit(cluster, tmp_path / "other", 1, given(tmp_path / "cancelled", 5000), env=settings(), servers=1)
    _until(cluster, number, run, 2)
    first = _kill(cluster, number, 0)
    _kill(cluster, number, first)
    _until(cluster, other, tmp_path / "cancelled", 1)
    cluster.run("scancel", str(other))
    with serve_engine(EngineServer()) as server:
        alone(given(tmp_path / "alone", url=server.root))
    checked(cluster, number, logs)
    batch = (logs / "batch.out").read_text()
    cause = r"the server http://node\d+:\d+ ended with status 137, after 1 restarts"
    assert re.search(rf"^parallel-rl: job {number} queued again: {cause}$", batch, re.M), batch
    assert re.search(rf"^restart 1 of job {number}: it asked for it itself \(.*{cause}", batch, re.M), batch
    assert "it is started again (1 of 1 times)" in words(logs) and "waiting for the completion server" in batch
    assert last_line(logs) == f"parallel-rl: job {number} completed"
    assert [row["step"] for row in curve(run)] == list(range(1, STEPS + 1))
    for row, expected in zip(curve(run), curve(tmp_path / "alone"), strict=True):
        assert {**row, "phase": 0} == pytest.approx({**expected, "phase": 0}, rel=1e-8, abs=1e-12)
    checked(cluster, other, tmp_path / "other", "CANCELLED")
    cluster.until(lambda: "not queued again: Slurm ended it" in last_line(tmp_path / "other"), WAIT, "its last word")
    for job in (number, other):
        cluster.until(lambda job=job: not cluster.processes(job, SERVER), 60, "no server to be left")  # type: ignore[misc]


def test_servers_that_cannot_start_end_the_job_with_the_cause(cluster: Cluster, tmp_path: Path) -> None:
    """Two of them, of which neither is waited for."""
    env = {"SERVER_COMMAND": "echo no such model >&2; exit 7", "SERVER_RESTARTS": "0"}
    number = submit(cluster, tmp_path / "logs", 1, given(tmp_path / "run"), env=env, servers=2)
    checked(cluster, number, tmp_path / "logs", "FAILED")
    what = r"failed: the server http://node\d+:\d+ ended with status 7, after 0 restarts"
    assert re.search(what, last_line(tmp_path / "logs"))
    assert "no such model" in words(tmp_path / "logs") and not (tmp_path / "run").exists()
