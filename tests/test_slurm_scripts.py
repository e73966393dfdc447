"""The Slurm scripts, the gate and the linter of #SBATCH lines, without a cluster."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel_rl.testing import pool
from parallel_rl.training.config.sections import ParallelConfig
from tests.launch import UNCOMPILED
from tests.training.helpers import DATA, first_records
from tools.lint_sbatch import lint

ROOT = Path(__file__).parents[1]
CONFIG = "configs/grpo_arithmetic.yaml"
pool.preload("megatron.core", "parallel_rl.training.preflight.gate")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("#!/bin/bash\nsrun true\n#SBATCH --nodes=2\n", 3, "first command"),
        ("#!/bin/bash\n# SBATCH --nodes=2\n", 2, "comment"),
        ("#!/bin/bash\n#sbatch --nodes=2\n", 2, "comment"),
        ("#!/bin/bash\n #SBATCH --nodes=2\n", 2, "comment"),
        ("#!/bin/bash\n#SBATCH--nodes=2\n", 2, "comment"),
        ("#!/bin/bash\n#SBATCH --nodes=$NODES\n", 2, "variable"),
        ("#!/bin/bash\n#SBATCH --output=~/%j.out\n", 2, "tilde"),
        ("#!/bin/bash\n#SBATCH --output=nowhere/%j.out\n", 2, "does not exist"),
        ("#!/bin/bash\n#SBATCH -o %j/out-%j\n", 2, "no folder"),
        ("#!/bin/bash\n#SBATCH -e all.out\n", 2, "one file"),
        ("#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH -N4\n", 3, "line 2"),
        ("#!/bin/bash\n#SBATCH -N2\n#SBATCH hetjob\n#SBATCH -N1\n#SBATCH --nodes=4\n", 5, "line 4"),
        ("#!/bin/bash\n#SBATCH --requeue\n", 2, "append"),
        ("#!/bin/bash\n#SBATCH --signal=USR1@60\ntrap stop USR1\n", 2, "B:USR1@60"),
        ("#!/bin/bash\n#SBATCH --signal=B:USR1@60\n", 2, "dies of it"),
        ("#!/bin/bash\n#SBATCH --time=10:00\n#SBATCH --signal=B:USR1@600\ntrap stop USR1\n", 3, "at once"),
        ("#!/bin/bash\n#SBATCH\n", 2, "empty"),
    ],
)
def test_the_linter_finds(text: str, line: int, what: str) -> None:
    [(found, said)] = lint(text, ROOT)
    assert found == line
    assert what in said


def test_the_linter_leaves_good_scripts_alone() -> None:
    for script in (ROOT / "slurm").glob("*.sbatch"):
        assert lint(script.read_text(), ROOT) == []
    good = "#!/bin/bash\n#SBATCH --signal=B:USR1@60 --output=slurm-%A_%a.out\n# sbatch this\ntrap stop USR1\n"
    assert lint(good, ROOT) == []


def _in_job(folder: Path, words: list[str], job: int, **given: str) -> subprocess.CompletedProcess[str]:
    """`bash WORDS` as in a job of two nodes; the one Slurm command in it is a stand-in that says their names."""
    (folder / "scontrol").write_text("#!/bin/sh\necho node9\necho node10\n")
    (folder / "scontrol").chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[9-10]",
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "JOB_FILES": "slurm",
    }
    env = {"PATH": f"{folder}:/usr/bin:/bin", "LOG_DIR": str(folder / "logs"), **slurm, **given}
    return subprocess.run(["bash", *words], cwd=ROOT, env=env, capture_output=True, text=True)


def _environment(folder: Path, job: int, **given: str) -> str:
    """What env.sh makes of a job."""
    code = (
        'set -euo pipefail; source slurm/env.sh; echo "$MASTER_ADDR $MASTER_PORT $NPROC_PER_NODE $CPUS ${CONTAINER[*]}"'
    )
    done = _in_job(folder, ["-c", code], job, **given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_environment_comes_from_the_job_and_the_site(tmp_path: Path) -> None:
    assert _environment(tmp_path, 41234) == "node9 25234 8 96"
    assert _environment(tmp_path, 41235, NPROC_PER_NODE="4", SLURM_CPUS_PER_TASK="48") == "node9 25235 4 48"
    site = tmp_path / "site.conf"
    site.write_text("CONTAINER_IMAGE=image.sqsh CONTAINER_MOUNTS=/data:/data\n")
    container = _environment(tmp_path, 1, SITE_CONF=str(site)).split(" ", 4)[4]
    mounts = f"--container-mounts={ROOT}:{ROOT},/data:/data"
    assert container == f"--container-image=image.sqsh --no-container-mount-home --container-workdir={ROOT} {mounts}"


def test_a_job_says_where_its_ranks_meet_if_it_did_not_choose(tmp_path: Path) -> None:
    """A MASTER_ADDR that the shell of sbatch happens to have costs GATE_SECONDS."""
    warning, settings = _environment(tmp_path, 1, MASTER_ADDR="host7").splitlines()
    assert "the ranks meet at MASTER_ADDR = host7, which the shell of sbatch" in warning
    assert settings.startswith("host7 ")
    assert len(_environment(tmp_path, 1, MASTER_ADDR="node9").splitlines()) == 1


FAILED_THERE = "1: [default0]:parallel-rl: error (rank 1): --import mine failed: RuntimeError: x"


@pytest.mark.parametrize(
    ("check", "log", "srun", "status", "end"),
    [
        pytest.param("", "0: [default0]:3 s; wrote x", 0, 0, "completed", id="done"),
        pytest.param(
            *("", "0: [default0]:nothing is left to do: run/step_000003 has all steps (rl step 3)", 0, 0),
            "completed: nothing is left to do: run/step_000003 has all steps (rl step 3)",
            id="nothing to do",
        ),
        pytest.param(
            "",
            "0: parallel-rl: error (node 0, node9): rank 0 was killed by SIGTERM\n"
            f"{FAILED_THERE}\n1: parallel-rl: error (node 1, node10): rank 1 ended with exit code 2",
            *(143, 2, f"failed with status 2: {FAILED_THERE}"),
            id="a rank fails, and the other node is ended",
        ),
        pytest.param(
            "srun: unrecognized option '--container-image=x'",
            *("", 255, 1),
            "failed: the check before the start of the ranks (status 255): srun: unrecognized option '--container-image=x' "
            "(CONTAINER_IMAGE needs the pyxis plugin of Slurm)",
            id="no pyxis",
        ),
    ],
)
def test_the_last_line_and_the_status_of_a_job(
    check: str, log: str, srun: int, status: int, end: str, tmp_path: Path
) -> None:
    """The whole script; a stand-in for srun leaves logs as a job has, and srun's status."""
    (tmp_path / "log").write_text(log + "\n")
    (tmp_path / "srun").write_text(
        f"""#!/bin/bash
if [[ " $* " = *" check "* ]]; then {f'echo "{check}" >&2; exit {srun}' if check else "exit 0"}; fi
touch "$PARALLEL_RL_JOB_DIR"/up/{{0,1}}
cp "{tmp_path}/log" "$PARALLEL_RL_JOB_DIR/node-0.log"
exit {srun}
"""
    )
    (tmp_path / "srun").chmod(0o755)
    done = _in_job(
        tmp_path, ["slurm/train.sbatch", CONFIG], 7, SLURM_JOB_NUM_NODES="2", SLURM_JOB_END_TIME="4102444800"
    )
    assert done.stdout.splitlines()[-1] == f"parallel-rl: job 7 {end}", done.stdout + done.stderr
    assert done.returncode == status


def test_the_script_of_ones_own_on_the_page_is_queued_again(tmp_path: Path) -> None:
    """At USR1 the script leaves STOP and waits on; it ends with the step's status, not with 138."""
    text = (ROOT / "slurm" / "README.md").read_text()
    [script] = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", text, re.DOTALL)
    assert lint(script, ROOT) == []
    (tmp_path / "job.sbatch").write_text(script)
    for name, does in {
        "srun": 'touch up; until [ -e "$PARALLEL_RL_JOB_DIR/STOP" ]; do sleep 0.05; done; sleep 0.3\n'
        'touch "$PARALLEL_RL_JOB_DIR/REQUEUE"; exit 3',
        "scontrol": 'case $1 in requeue) echo "$2" > requeued ;; *) echo node1 ;; esac',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n",
        "SLURM_CPUS_ON_NODE": "1",
    }
    job = subprocess.Popen(["bash", "job.sbatch"], cwd=tmp_path, env=env)
    while not (tmp_path / "up").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=20) == 3
    assert (tmp_path / "requeued").read_text() == "7\n"


def test_a_job_that_slurm_ends_before_scontrol_has_its_answer_is_queued_again(tmp_path: Path) -> None:
    """On a busy cluster the requeue's SIGTERM comes while scontrol still waits; the log said that the requeue failed."""
    for name, does in {"scontrol": 'kill -TERM $$; echo "$1 $2" > requeued', "sleep": "true"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    code = f"""set -euo pipefail; source {ROOT}/slurm/job.sh; trap 'echo "$became"' EXIT
stop() {{ became="stopped: $1"; exit 1; }}
folder=. restarts=0 MAX_RESTARTS=1 short='' asked='' job=7 became=''; again 'saved step 1; more'"""
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, env=env, text=True, capture_output=True)
    assert (done.stdout, done.returncode) == ("queued again: saved step 1\n", 0), done.stderr
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_nodes_with_fewer_cores_and_an_environment_that_was_left_out(tmp_path: Path) -> None:
    """srun refuses a task of more cores than one of the nodes has; after `sbatch --export=NONE` its tasks have no PATH."""
    assert _environment(tmp_path, 1, SLURM_JOB_CPUS_PER_NODE="96(x2),64(x3),128").split()[3] == "64"
    code = 'set -euo pipefail; source slurm/env.sh; echo "${SLURM_EXPORT_ENV-unset}"'
    assert _in_job(tmp_path, ["-c", code], 1, SLURM_EXPORT_ENV="NONE").stdout == "unset\n"


def test_a_site_may_load_modules(tmp_path: Path) -> None:
    """As Lmod's and Tcl's do: they read names that are not set, and test by commands that fail; what fails itself is told."""
    modules = 'module() { [ -n "$LOADEDMODULES" ]; false; [ "$2" != nowhere ]; }\n'
    site = tmp_path / "site.conf"
    site.write_text(f'{modules}module load cuda\n[ -n "$NOT_SET" ] && true\nNPROC_PER_NODE=2\n')
    assert _environment(tmp_path, 1, SITE_CONF=str(site)).split()[2] == "2"
    site.write_text(f"{modules}module load nowhere\nNPROC_PER_NODE=2\n")
    done = _in_job(tmp_path, ["slurm/train.sbatch", CONFIG], 7, SITE_CONF=str(site))
    assert done.returncode == 1 and "line 2: module load nowhere ended with status 1" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("image", "python"), [("image.sqsh", "python"), ("", f"{ROOT}/.venv/bin/python")])
def test_a_container_has_its_own_python(tmp_path: Path, image: str, python: str) -> None:
    code = 'set -euo pipefail; source slurm/env.sh; echo "$PYTHON"'
    assert _in_job(tmp_path, ["-c", code], 1, CONTAINER_IMAGE=image).stdout.strip() == python
    assert _in_job(tmp_path, ["-c", code], 1, CONTAINER_IMAGE=image, PYTHON="/p").stdout.strip() == "/p"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"SITE_CONF": "/none"}, "SITE_CONF = /none is not there or cannot be read"),
        ({"NPROC_PER_NODE": "16"}, "NPROC_PER_NODE = 16: a node has 8 GPUs here, and a rank needs one"),
        ({"SLURM_GPUS_ON_NODE": "0"}, r"NPROC_PER_NODE = 0 is not a number of ranks \(a node has 0 GPUs here\)"),
        ({"SERVER_COMMAND": "x"}, "SERVER_COMMAND needs nodes for servers: sbatch slurm/with_server.sbatch"),
        ({"SLURM_HET_SIZE": "2"}, "SERVER_COMMAND is empty, and there are nodes for servers"),
        ({"JOB_FILES": "none"}, "there is no none/env.sh in .*: call sbatch from the repository's root"),
    ],
)
def test_the_job_ends_with_a_word_on_what_it_was_given_wrong(tmp_path: Path, given: dict[str, str], why: str) -> None:
    done = _in_job(tmp_path, ["slurm/train.sbatch", CONFIG], 7, **given)
    assert done.returncode == 1
    assert re.match(f"parallel-rl: job 7 failed: {why}", done.stdout.splitlines()[-1])


def test_the_script_hears_signals_before_it_runs_any_program() -> None:
    """A signal's default is the death of the batch shell."""
    lines = [line for line in (ROOT / "slurm" / "train.sbatch").read_text().splitlines() if not line.startswith("#")]
    assert re.fullmatch(r"(\w+='' ?)+", lines[0])
    assert [re.sub(r".*' (\w+).*", r"\1", line) for line in lines[1:4]] == ["USR1", "TERM", "EXIT"]


def _check_groups(rank: int, config: ParallelConfig, wrong: int | None) -> None:
    from parallel_rl.training.preflight import gate

    add = gate.reduce_
    if rank == wrong:  # a device whose sums are off
        gate.reduce_ = lambda values, group: add(values, group) * (1 + 1e-6)
    try:
        gate.check_groups(config)
    finally:
        gate.reduce_ = add


def test_the_gate_lets_good_worlds_through_and_names_a_rank_that_computes_wrong() -> None:
    layout = ParallelConfig(tensor=2, context=2)
    pool.run_world(4, _check_groups, layout, None)
    pool.run_world(4, _check_groups, ParallelConfig(pipeline=2), None)
    with pytest.raises(pool.WorldError) as failure:
        pool.run_world(4, _check_groups, layout, 3)
    assert set(failure.value.errors) == {0, 1, 2, 3}
    assert all("rank 3: " in error and "rank 0, " not in error for error in failure.value.errors.values())


def test_the_gate_names_a_rank_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from parallel_rl.training.preflight.gate import check_in

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # as torchrun's agent has it
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    hosts = {"TORCHELASTIC_USE_AGENT_STORE": "True", "PARALLEL_RL_HOSTS": "node1 node2"}
    for name, value in {**world, **hosts}.items():
        monkeypatch.setenv(name, str(value))
    store.set("gate/up/1", "")
    store.set("gate/up/3", "")
    with pytest.raises(ValueError, match=r"rank 2 \(on node2\) did not come up in 0.5 s"):
        check_in(0.5)


@pytest.mark.slow
def test_the_commands_for_two_hosts_work_as_they_are_written(tmp_path: Path) -> None:
    text = (ROOT / "slurm" / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^    (\.venv/bin/torchrun --nnodes=2.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    small = "--evaluation=null --warmup=null --parallel={} --model.hidden=16 --rl.steps=1 --rl.prompts=4 --rl.updates=1"
    rollouts = f"--data={{rollouts: {first_records(DATA / 'arithmetic_rollouts.jsonl', 32)}}}"
    hosts = []
    for command in commands:
        words = shlex.split(command.replace("host1", "127.0.0.1").replace("29500", str(port)))
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:], *small.split(), rollouts]
        words = ["--nproc-per-node=1" if word.startswith("--nproc") else word for word in words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **UNCOMPILED}
        hosts.append(
            subprocess.Popen(
                [*words, f"--run.dir={tmp_path}"],
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [host.communicate(timeout=120)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(said)
    assert "gate: 2 ranks are up" in said[0] and "gate: megatron-core's known faults: this config reaches" in said[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
