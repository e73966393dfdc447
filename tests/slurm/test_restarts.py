"""How a job ends and starts again: a stop that is asked for at any instant is heard, a restart says its cause, restarts end
somewhere, and what began anew does so once."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import arguments, checked, curve, last_line, submit, words

pytestmark = pytest.mark.slurm
WAIT = 400.0  # seconds, for a busy machine
INSTANTS = {"env.sh": None, "the check": "check", "the ranks start": "torchrun"}


def _held(folder: Path, at: str | None) -> dict[str, str]:
    """Settings under which a job's first start rests until it was asked to stop: in env.sh, or in the program named by `at`."""
    folder.mkdir()
    asked = '[ -n "$asked$ended" ]' if at is None else '[ -e "$PARALLEL_RL_JOB_DIR/STOP" ]'
    rest = f'[ -n "${{SLURM_RESTART_COUNT:-}}" ] || {{ touch {folder}/here; until {asked}; do sleep 0.1; done; }}\n'
    if at is None:
        (folder / "site.conf").write_text(rest)
        return {"SITE_CONF": str(folder / "site.conf")}
    script = folder / "python"
    script.write_text(f'#!/bin/bash\nif [[ "$*" = *{at}* ]]; then\n{rest}fi\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return {"PYTHON": str(script)}


def _usr1(cluster: Cluster, number: int) -> None:
    cluster.run("scancel", "--batch", "--signal=USR1", str(number))


def _rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_a_stop_is_heard_before_the_ranks_can_see_it(cluster: Cluster, tmp_path: Path) -> None:
    """In env.sh, during the check, while torchrun starts; each then goes on, and forgets the stop of the start before.

    Takes minutes: three jobs are stopped at instants of their start, and each runs again to its end.
    """
    jobs = {}
    for name, at in INSTANTS.items():
        folder = tmp_path / name.replace(" ", "-")
        jobs[folder] = submit(cluster, folder / "logs", 1, arguments(folder / "run", 2), env=_held(folder, at))
    for folder, number in jobs.items():
        cluster.until((folder / "here").exists, WAIT, f"job {number} to be in {folder.name}")
        _usr1(cluster, number)
    for folder, number in jobs.items():
        said = checked(cluster, number, folder / "logs")
        assert int(cluster.job(number)["Restarts"]) == 1, said
        assert last_line(folder / "logs") == f"parallel-rl: job {number} completed"
        batch = (folder / "logs" / "batch.out").read_text()
        how = "stopped by the file STOP" if folder.name == "the-ranks-start" else "stopped before its ranks started"
        assert re.search(rf"^parallel-rl: job {number} queued again: {how}", batch, re.MULTILINE)
        cause = rf"it asked for it itself \(time limit or USR1: {how}.*\); of its last hosts down now: none"
        assert re.search(rf"^restart 1 of job {number}: {cause}$", batch, re.MULTILINE)
        assert len(curve(folder / "run")) == 2


def test_slurms_own_restarts_say_which_host_is_down_and_end_at_the_limit(cluster: Cluster, tmp_path: Path) -> None:
    """Takes minutes: Slurm waits before it calls a silent host down and queues its job again."""
    logs = tmp_path / "logs"
    number = submit(cluster, logs, 2, arguments(tmp_path / "run", 5000), env={"MAX_RESTARTS": "0"})
    cluster.until(lambda: _rows(tmp_path / "run") >= 1, WAIT, "a first step")
    [_, node] = cluster.run("scontrol", "show", "hostnames", cluster.job(number)["NodeList"]).stdout.split()
    cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        checked(cluster, number, logs, "FAILED")
    finally:
        cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
    cause = r"Slurm requeued it \(a node failed, preemption, scontrol requeue\)"
    batch = (logs / "batch.out").read_text()
    assert f"parallel-rl: job {number} queued again by Slurm (a node failed, " in batch
    assert re.search(rf"^restart 1 of job {number}: {cause}; of its last hosts down now: {node} \(down", batch, re.M)
    assert re.fullmatch(
        rf"parallel-rl: job {number} failed: 1 restarts, MAX_RESTARTS = 0; the last: {cause}", last_line(logs)
    )
    assert not list(logs.rglob("node-*.1.log"))


def test_a_run_that_begins_anew_does_so_once_however_often_its_job_is_queued_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Queued again before it began, it must not go on with what an earlier job left; once it began, it must go on.

    Takes minutes: one job is queued again and again, and starts its ranks each time.
    """
    run, logs = tmp_path / "run", tmp_path / "logs"
    checked(cluster, submit(cluster, tmp_path / "earlier", 1, arguments(run, 2)), tmp_path / "earlier")
    given = [*arguments(run, 200), "--run.resume=never"]
    number = submit(cluster, logs, 1, given, env={**_held(tmp_path / "held", None), "MAX_RESTARTS": "2"})
    cluster.until((tmp_path / "held" / "here").exists, WAIT, "the first start")
    cluster.run("scontrol", "requeue", str(number))
    cluster.until(lambda: _rows(run) > 2, WAIT, "its own third step")
    assert "continuing from" not in words(logs)
    _usr1(cluster, number)
    cluster.until(lambda: "continuing from" in words(logs), WAIT, "the third start to go on")
    _usr1(cluster, number)
    checked(cluster, number, logs, "FAILED")
    [found] = logs.rglob("node-*.1.log")
    goes_on = rf"the same command with --run.resume auto resumes from {run}/checkpoints/step_\d+"
    assert re.search(rf"stopped by the file STOP \(rank 0\) after rl step \d+ of 200; {goes_on}", found.read_text())
    ends = r"stopped, not queued again: 2 restarts, MAX_RESTARTS = 2; stopped by the file STOP .*"
    assert re.fullmatch(rf"parallel-rl: job {number} {ends}{goes_on}", last_line(logs))
    assert [row["step"] for row in curve(run)] == list(range(1, _rows(run) + 1))


def test_of_an_array_only_the_task_that_was_asked_is_queued_again(cluster: Cluster, tmp_path: Path) -> None:
    """One task has the array's own number, which means all of them to Slurm.

    Takes a minute: two tasks run, and one of them twice.
    """
    given = arguments(tmp_path / "task-{task}", 100)
    array = submit(cluster, tmp_path / "logs", 1, given, "--array=0-1", f"--output={tmp_path}/logs/%a.out")
    cluster.until(lambda: cluster.count("RUNNING", array) == 2, WAIT, "both tasks to start")
    tasks = {task: f"{array}_{task}" for task in (0, 1)}
    [asked] = [task for task, name in tasks.items() if cluster.job(name)["JobId"] == str(array)]
    cluster.until(lambda: _rows(tmp_path / f"task-{asked}") > 1, WAIT, f"a second step of task {asked}")
    cluster.run("scancel", "--batch", "--signal=USR1", tasks[asked])
    cluster.until(lambda: cluster.count("COMPLETED", array) == 2, WAIT, "both to be done")
    assert {task: cluster.job(name)["Restarts"] for task, name in tasks.items()} == {asked: "1", 1 - asked: "0"}


def test_a_time_limit_shorter_than_its_notice_is_said_and_is_no_circle(cluster: Cluster, tmp_path: Path) -> None:
    """Takes as long as Slurm's shortest limits, which count in minutes."""
    logs = tmp_path / "logs"
    number = submit(cluster, logs, 1, arguments(tmp_path / "run", 100_000), "--time=8")
    checked(cluster, number, logs, "FAILED")
    what = r"the time limit comes in \d+ s, and Slurm asks to stop 600 s before it, that is at once"
    add = r"sbatch --signal=B:USR1@1[0-2]\d, or a longer --time"
    assert re.search(rf"^parallel-rl: warning: {what}.*{add}$", (logs / "batch.out").read_text(), re.M)
    assert re.match(rf"parallel-rl: job {number} stopped, not queued again: {what}.*{add}; stopped ", last_line(logs))


def test_a_cancelled_job_says_what_was_saved(cluster: Cluster, tmp_path: Path) -> None:
    """Takes half a minute: two nodes must reach a first step before they can be cancelled."""
    logs = tmp_path / "logs"
    number = submit(cluster, logs, 2, arguments(tmp_path / "run", 5000))
    cluster.until(lambda: _rows(tmp_path / "run") >= 1, WAIT, "a first step")
    cluster.run("scancel", str(number))
    checked(cluster, number, logs, "CANCELLED")
    cluster.until(lambda: last_line(logs).startswith("parallel-rl: job"), WAIT, "its last word")
    assert re.search(
        rf"job {number} stopped, not queued again: Slurm ended it \(scancel, the time limit\); stopped by .* resumes from",
        last_line(logs),
    )
