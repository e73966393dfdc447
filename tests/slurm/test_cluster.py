"""The private cluster itself: real scheduling, names, GPUs; nothing stays behind; a normal user can have one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import ROOT

pytestmark = pytest.mark.slurm


def _ours(folder: Path) -> list[str]:
    """Processes that belong to a cluster's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if str(folder).encode() in text and state != "Z":
                found.append(entry.name)
    return found


def test_jobs_see_their_nodes_and_gpus_and_nothing_stays_behind(tmp_path: Path) -> None:
    hosts = Path("/etc/hosts").read_bytes()
    with Cluster(nodes=2) as cluster:
        assert cluster.node_states() == {"node1": "IDLE", "node2": "IDLE"}
        say = 'srun --label bash -c "hostname; echo \\$CUDA_VISIBLE_DEVICES; getent hosts node2"; setsid sleep 1000 &'
        output = f"--output={tmp_path}/out"
        number = cluster.submit("--nodes=2", "--gpus-per-node=8", output, f"--wrap={say}")
        assert cluster.wait(number, timeout=60) == "COMPLETED"
        lines = (tmp_path / "out").read_text().splitlines()
        assert {"0: node1", "1: node2"} < set(lines)
        assert lines.count("0: 0,1,2,3,4,5,6,7") == 1
        assert sum(line.split()[1:] == ["127.0.0.12", "node2"] for line in lines) == 2
        waiting = cluster.submit("--nodes=1", f"--output={tmp_path}/late", "--wrap=sleep 1000")
        cluster.wait(waiting, ["RUNNING"], timeout=30)
        folder = cluster.folder
    assert not folder.exists()
    assert not _ours(folder)
    assert Path("/etc/hosts").read_bytes() == hosts


def test_a_node_that_loses_its_power_sends_its_job_back(tmp_path: Path) -> None:
    with Cluster(nodes=2) as cluster:
        number = cluster.submit(
            "--nodes=1", "--nodelist=node2", "--requeue", f"--output={tmp_path}/out", "--wrap=echo began; sleep 300"
        )
        cluster.until(lambda: (tmp_path / "out").exists(), 30, "the job to begin")
        cluster.kill_node("node2")
        cluster.wait(number, ["PENDING"], timeout=90)
        cluster.revive("node2")
        cluster.wait(number, ["RUNNING"], timeout=60)
        assert cluster.job(number)["Restarts"] == "1"


_AS_USER = """
import os
os.setgid(65534); os.setuid(65534)
os.environ["HOME"] = "/tmp"
from cluster import Cluster
with Cluster(nodes=1) as cluster:
    number = cluster.submit("--nodes=1", "--output=/dev/null", "--chdir=/tmp", "--wrap=srun true")
    print(cluster.wait(number, timeout=60))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run as a normal user already")
def test_a_normal_user_can_have_one() -> None:
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no python3 that a normal user could run")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copy(ROOT / "tests/slurm/cluster.py", folder)
        done = subprocess.run([python, "-c", _AS_USER], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "COMPLETED", done.stderr


def test_one_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom tests.slurm.cluster import Cluster\n"
        "with Cluster(nodes=1) as cluster:\n    print(cluster.folder, flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    process.send_signal(signal.SIGINT)
    process.wait(30)
    end = time.monotonic() + 10
    while (folder.exists() or _ours(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not folder.exists() and not _ours(folder)
    shutil.rmtree(folder, ignore_errors=True)
