"""The private cluster itself: real scheduling, names, GPUs; nothing stays behind; a normal user can have one."""

from __future__ import annotations

import itertools
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
from tests.slurm.settings import Block

pytestmark = pytest.mark.slurm
# a job's process that hides: of no session, environment or process group of its job's
HIDDEN = "setsid env -i sleep {} &"


def _left(folder: Path, hidden: str) -> list[str]:
    """Processes that belong to a cluster's folder, or sleep for `hidden` seconds."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command, around = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            ours = str(folder).encode() in command + around or command == f"sleep\0{hidden}\0".encode()
            if ours and state != "Z":
                found.append(f"{entry.name} {command!r}")
    return found


def _hidden() -> str:
    return str(100_000 + time.time_ns() % 1_000_000_000)


def test_jobs_see_their_nodes_and_gpus_and_nothing_stays_behind(tmp_path: Path) -> None:
    """Takes half a minute: it starts and ends a whole private cluster, which no other test may share."""
    hosts, hidden = Path("/etc/hosts").read_bytes(), _hidden()
    with Cluster(nodes=2) as cluster:
        assert cluster.idle() and cluster.nodes == ["node1", "node2"]
        ask = 'srun --label bash -c "hostname; echo \\$CUDA_VISIBLE_DEVICES; getent hosts node2";'
        say = f"{ask} {HIDDEN.format(hidden)}"
        output = f"--output={tmp_path}/out"
        number = cluster.submit("--nodes=2", "--gpus-per-node=8", output, f"--wrap={say}")
        assert cluster.wait(number) == "COMPLETED"
        lines = (tmp_path / "out").read_text().splitlines()
        assert {"0: node1", "1: node2"} < set(lines)
        assert lines.count("0: 0,1,2,3,4,5,6,7") == 1
        assert sum(line.split()[1:] == ["127.0.0.12", "node2"] for line in lines) == 2
        waiting = cluster.submit("--nodes=1", f"--output={tmp_path}/late", "--wrap=sleep 1000")
        cluster.wait(waiting, ["RUNNING"])
        folder = cluster.folder
        assert any("munged" in found for found in _left(folder, hidden))
    assert not folder.exists()
    assert not _left(folder, hidden)
    assert Path("/etc/hosts").read_bytes() == hosts


_AS_USER = """
import itertools
import os
os.setgid(65534); os.setuid(65534)
os.environ["HOME"] = "/tmp"
from tests.slurm.cluster import Cluster
with Cluster(nodes=1) as cluster:
    number = cluster.submit("--nodes=1", "--output=/dev/null", "--chdir=/tmp", "--wrap=srun true; HIDDEN")
    print(cluster.folder)
    print(cluster.wait(number))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run as a normal user already")
def test_a_normal_user_can_have_one() -> None:
    """Takes half a minute: a cluster of a user without rights is another one, started for this alone."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no python3 that a normal user could run")
    hidden = _hidden()
    code = _AS_USER.replace("HIDDEN", HIDDEN.format(hidden))
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        shutil.copytree(ROOT / "tests/slurm", Path(name, "tests/slurm"))
        done = subprocess.run([python, "-c", code], cwd=name, capture_output=True, text=True, timeout=600)
    folder, _, state = done.stdout.strip().partition("\n")
    assert state == "COMPLETED", done.stderr
    assert not Path(folder).exists() and not _left(Path(folder), hidden)


_HOLDER = """
import signal, sys, time
from tests.slurm.cluster import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
with Cluster(nodes=1, disk=1 if DISK else None) as cluster:
    number = cluster.submit("--nodes=1", "--output=/dev/null", "--wrap=HIDDEN sleep 1000")
    cluster.until(lambda: bool(cluster.processes(number, "sleep 1000")), 300, "the job to begin")
    print(cluster.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_behind_when_its_holder_is_killed(number: signal.Signals) -> None:
    """By itself after SIGINT, by its guard after SIGKILL, which is as sudden as SIGTERM to a process without a handler.

    Takes half a minute: the cluster of a killed process must be started to be left behind.
    """
    hidden = _hidden()
    code = _HOLDER.replace("HIDDEN", HIDDEN.format(hidden)).replace("DISK", str(os.getuid() == 0))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir() and any(f"{hidden}" in found for found in _left(folder, hidden))
    process.send_signal(number)
    process.wait(120)
    end = time.monotonic() + 120
    while (folder.exists() or _left(folder, hidden)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not folder.exists() and not _left(folder, hidden)
    assert str(folder) not in Path("/proc/self/mounts").read_text()


def test_clusters_side_by_side_have_ports_and_jobs_of_their_own() -> None:
    """Below those that Linux gives to outgoing connections, the ports that jobs take from their ids (slurm/env.sh) too."""
    blocks = [Block(5) for _ in range(20)]
    try:
        ports = sorted(block.port for block in blocks)
        jobs = sorted(block.first_job for block in blocks)
        assert min(b - a for a, b in itertools.pairwise(ports)) >= 5
        assert min(b - a for a, b in itertools.pairwise(jobs)) >= 50
        assert ports[-1] + 5 < 20_000 and 20_000 + jobs[-1] + 90 < 32_768
    finally:
        for block in blocks:
            block.close()
