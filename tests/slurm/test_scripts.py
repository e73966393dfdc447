"""What the job says where it cannot start, within its gate's seconds; and `parallel-rl submit` on a real queue."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_rl.cli import main
from tests.slurm.cluster import Cluster
from tests.slurm.runs import CONFIG, ROOT, UNCOMPILED, arguments, checked, curve, last_line, submit

pytestmark = pytest.mark.slurm
GATE = 40  # seconds, for Python and torch on a busy machine


def _python(folder: Path, when: str, instead: str) -> dict[str, str]:
    """Settings with a Python that on some node does `instead`."""
    script = folder / "python"
    script.write_text(f'#!/bin/bash\n[ "$SLURM_NODEID" = {when} ] && {instead}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return {"PYTHON": str(script), "GATE_SECONDS": str(GATE)}


def _end(folder: Path) -> str:
    return last_line(folder / "logs")


def _ranks(folder: Path, code: str) -> dict[str, str]:
    """Settings under which rank 1 runs `code` before anything else."""
    (folder / "sitecustomize.py").write_text(f"import os, time\nif os.environ.get('RANK') == '1':\n    {code}\n")
    return {"PYTHONPATH": str(folder), "GATE_SECONDS": str(GATE)}


def test_hosts_and_ranks_that_hang_are_named(cluster: Cluster, tmp_path: Path) -> None:
    """Two jobs side by side: on one a host hangs, on the other a rank.

    Takes a minute: what hangs is told from what is slow by waiting.
    """
    began, numbers = time.monotonic(), {}
    for name in ("host", "rank"):
        folder = tmp_path / name
        folder.mkdir()
        hung = _python(folder, "1", "exec sleep 3600") if name == "host" else _ranks(folder, "time.sleep(3600)")
        numbers[name] = submit(cluster, folder / "logs", 2, arguments(folder / "run", 1), env=hung)
    said = {name: checked(cluster, number, tmp_path / name / "logs", "FAILED") for name, number in numbers.items()}
    assert time.monotonic() - began < 300 + GATE
    assert "(node 0) did not come up" not in said["host"]
    what = r"parallel-rl: error: node\d+ \(node 1\) did not come up"
    assert re.search(what, said["host"])
    assert re.fullmatch(rf"parallel-rl: job {numbers['host']} failed with status \d+: {what}", _end(tmp_path / "host"))
    what = rf"rank 1 \(on node\d+\) did not come up in {GATE} s"
    assert re.search(what, (tmp_path / "rank" / "logs" / "batch.out").read_text())
    assert re.search(rf"parallel-rl: job {numbers['rank']} failed with status \d+: .*{what}", _end(tmp_path / "rank"))
    for name in numbers:
        assert not (tmp_path / name / "run" / "checkpoints").exists()


def test_a_rank_that_dies_at_the_start_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Takes half a minute: ranks on two nodes start until one dies."""
    env = _ranks(tmp_path, "os._exit(7)")
    checked(
        cluster,
        submit(cluster, tmp_path / "logs", 2, arguments(tmp_path / "run", 1), env=env),
        tmp_path / "logs",
        "FAILED",
    )
    assert "rank 1 ended with exit code 7" in (tmp_path / "logs" / "batch.out").read_text()
    assert not (tmp_path / "run" / "checkpoints").exists()


REFUSED = [
    ([CONFIG, "--parallel.tensor=2", "--parallel.context=1"], "the world has 1 ranks; parallel.tensor 2"),
    (["configs/none.yaml"], "none.yaml does not exist"),
    ([CONFIG, "--parallel={}", "--run.init_from=/none/step_1"], "run.init_from = '/none/step_1' cannot be used"),
    ([CONFIG, "--parallel={}", "--rl.stesp=3"], "unknown key rl.stesp = 3"),
]


def test_what_cannot_run_is_refused_by_one_process(cluster: Cluster, tmp_path: Path) -> None:
    """Jobs side by side: the config, the layout and the files that it names are looked at before any rank starts."""
    folders = [tmp_path / str(number) for number in range(len(REFUSED))]
    numbers = [
        submit(cluster, folder / "logs", 1, [*given, f"--run.dir={folder}/run"])
        for folder, (given, _) in zip(folders, REFUSED, strict=True)
    ]
    for folder, number, (_, what) in zip(folders, numbers, REFUSED, strict=True):
        checked(cluster, number, folder / "logs", "FAILED")
        assert what in (folder / "logs" / "batch.out").read_text()
        assert re.match(
            f"parallel-rl: job {number} failed: the check before .*: parallel-rl: error: .*{re.escape(what)}",
            _end(folder),
        )
        assert not list((folder / "logs").rglob("node-*.log")) and not list((folder / "logs").rglob("stdout.log"))
        assert not (folder / "run").exists()


def _words(folder: Path, *given: str) -> list[str]:
    return ["submit", *arguments(folder / "run", 1), "--ranks-per-node", "1", *given]


def test_submit_puts_the_same_job_on_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    """Takes half a minute: the job that was put on the queue runs."""
    words = _words(tmp_path, "--nodes", "2", "--job-name", "mine", "--partition", "main")
    env = {
        "PYTHON": sys.executable,
        "LOG_DIR": str(tmp_path / "logs"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "GATE_SECONDS": "120",
        **UNCOMPILED,
    }
    # the batch script's output, which the script puts into the folder that it is submitted from
    out = {"SBATCH_OUTPUT": os.devnull}
    command = [sys.executable, "-m", "parallel_rl.cli", *words]
    env = {**cluster.env, **env, **out}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    checked_run, command, said = done.stdout.splitlines()
    assert checked_run.startswith("ok: rl, 2 nodes")
    assert "sbatch --nodes=2 --partition=main --job-name=mine slurm/train.sbatch configs/" in command
    found = re.search(r"Submitted batch job (\d+)", said)
    assert found is not None
    number = int(found[1])
    assert f"the ranks' logs are in {tmp_path}/logs/{number};" in said
    checked(cluster, number, tmp_path / "logs")
    (ROOT / f"slurm-mine-{number}.out").unlink(missing_ok=True)
    assert len(curve(tmp_path / "run")) == 1
    [record] = (tmp_path / "run" / "submitted").iterdir()
    assert (record / "command.sh").read_text() == f"cd {ROOT}\n{command}\n"
    assert (record / "train.sbatch").read_bytes() == (ROOT / "slurm" / "train.sbatch").read_bytes()
    assert "hidden: 32" in (record / "config.yaml").read_text()


LOOP = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from parallel_rl.cluster import preemption
dist.init_process_group("gloo")
done = Path(sys.argv[1])
step = int(done.read_text()) if done.exists() else 0
print(f"from step {step}, {dist.get_world_size()} ranks", flush=True)
if step == 0 and dist.get_rank() == 0:
    Path(os.environ["PARALLEL_RL_JOB_DIR"], "STOP").touch()  # as the script does at USR1
while step < 300:
    step += 1
    time.sleep(0.01)
    if preemption.agree(torch.device("cpu"), failed=False).stop:
        break
dist.barrier()
if dist.get_rank() == 0:
    done.write_text(str(step))
    if step < 300:
        preemption.ask_for_restart(f"saved step {step}")
dist.destroy_process_group()
"""


def test_a_loop_of_ones_own_stops_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """Takes half a minute: a job of two nodes, queued again once, that trains by a file of its own."""
    (tmp_path / "loop.py").write_text(LOOP)
    given = ["--script", str(tmp_path / "loop.py"), str(tmp_path / "done")]
    number = submit(cluster, tmp_path / "logs", 2, given, env={"MAX_RESTARTS": "2"})
    checked(cluster, number, tmp_path / "logs")
    batch = (tmp_path / "logs" / "batch.out").read_text()
    assert batch.count("gate: 2 ranks are up") == 2 and "queued again: saved step 1" in batch, batch
    assert "from step 0, 2 ranks" in batch and "from step 1, 2 ranks" in batch
    assert (tmp_path / "done").read_text() == "300" and _end(tmp_path).endswith("completed")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--nodes", "1", "--partition", "nowhere"], "invalid partition"),
        (["--nodes", "1", "--gpus-per-node", "9"], "Requested node configuration is not available"),
        (["--nodes", "1", "--cpus-per-task", "99"], "More processors requested than permitted"),
        (["--nodes", "1", "--reservation", "nowhere"], "Requested reservation is invalid"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused_at_once(
    cluster: Cluster,
    tmp_path: Path,
    given: list[str],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    assert main(_words(tmp_path, *given)) == 2
    said = capsys.readouterr().err
    assert what in said
    assert re.search(r"available partitions:\n  main\* 4 nodes, each 16 CPUs, gpu:h100:8, at most 1-00:00:00", said)
    assert not (tmp_path / "run").exists()
