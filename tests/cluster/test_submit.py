"""`parallel-rl submit` without a cluster: what it asks for, shows, refuses and records."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from parallel_rl.cli import main
from parallel_rl.cluster.submit import Resources, plan, seconds
from parallel_rl.cluster.submit_checks import check_shared

ROOT = Path(__file__).parents[2]
CONFIG = "configs/grpo_arithmetic.yaml"
READ = ("SBATCH_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "CUDA_DEVICE_MAX", "PYTORCH_CUDA")  # some of what a job reads


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's root, no site settings, and none of what a job reads."""
    monkeypatch.chdir(ROOT)
    for name in list(os.environ):
        if name.startswith(READ) or name in ("NPROC_PER_NODE", "LOG_DIR", "PYTHON", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SITE_CONF", os.devnull)


@pytest.mark.usefixtures("shell")
def test_submit_shows_the_command_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site.conf"
    site.write_text("export SBATCH_ACCOUNT='my lab' SBATCH_GPUS_PER_NODE=h100:4\nCONTAINER_IMAGE=x.sqsh\n")
    for name, value in {
        "SITE_CONF": str(site),
        "MAX_RESTARTS": "3",
        "NCCL_DEBUG": "INFO",
        "LOG_DIR": "/my logs",
    }.items():
        monkeypatch.setenv(name, value)
    given = [CONFIG, "--nodes", "2", "--time", "1:00:00", "--dry-run", f"--run.dir={tmp_path}/run", "--rl.steps", "5"]
    assert main(["submit", *given]) == 0
    shell = "LOG_DIR='/my logs' MAX_RESTARTS=3 NCCL_DEBUG=INFO"
    settings = f"{shell} SBATCH_ACCOUNT='my lab' SBATCH_GPUS_PER_NODE=h100:4 SITE_CONF={site}"
    command = f"sbatch --nodes=2 --time=1:00:00 slurm/train.sbatch {CONFIG} --run.dir={tmp_path}/run --rl.steps 5"
    checked = f"ok: rl, 2 nodes × 4 = 8 ranks, TP 2 × CP 2 × PP 1 × DP 2, float32, writes to {tmp_path}/run"
    assert capsys.readouterr().out == f"{checked}\n{settings} {command}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("shell")
def test_arrays_servers_and_a_dumped_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first task stands for all in the check; the nodes of servers have what holds for the others, too."""
    given = [
        CONFIG,
        "--nodes",
        "1",
        "--dry-run",
        "--array",
        "3-5",
        f"--run.dir={tmp_path}/{{task}}",
        "--run.seed",
        "{task}",
    ]
    assert main(["submit", *given, "--dump-step", "2"]) == 0
    checked, command = capsys.readouterr().out.splitlines()
    assert checked.endswith(f"writes to {tmp_path}/3")
    assert command.endswith(f"'--run.dir={tmp_path}/{{task}}' --run.seed '{{task}}' --dump-step 2")
    assert "sbatch --nodes=1 --array=3-5 slurm/train.sbatch " in command
    given = [CONFIG, "--nodes", "2", "--time", "60", "--partition", "p", "--job-name", "x", "--dry-run"]
    assert main(["submit", *given, "--server-nodes", "1", "--server-command", "serve $PORT"]) == 0
    sizes = "--nodes=2 --time=60 --partition=p --job-name=x : --nodes=1 --time=60 --partition=p"
    assert (
        f"SERVER_COMMAND='serve $PORT' SITE_CONF=/dev/null sbatch {sizes} slurm/with_server.sbatch {CONFIG}"
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("shell")
def test_a_loop_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--script", "tests/launch.py", "--nodes", "2", "--gpus-per-node", "4", "--dry-run", "--", "--lr", "1"]
    assert main(["submit", *given]) == 0
    checked, command = capsys.readouterr().out.splitlines()
    assert checked == "ok: tests/launch.py, 2 nodes × 4 = 8 ranks"
    assert command.endswith("sbatch --nodes=2 --gpus-per-node=4 slurm/train.sbatch --script tests/launch.py --lr 1")


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize("words", ["--gres=gpu:h100:4", "--mail-type=END --gres=nvme,gpu:4 --comment='two words'"])
def test_anything_of_sbatch_is_handed_on(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """GPUs among it count the ranks, and hold against the eight of the script."""
    assert main(["submit", CONFIG, "--nodes", "1", "--sbatch", words, "--dry-run"]) == 0
    checked, command = capsys.readouterr().out.splitlines()
    assert "1 nodes × 4 = 4 ranks" in checked
    given = shlex.split(command)
    assert given[3 : given.index("slurm/train.sbatch")] == ["--gpus-per-node=4", *shlex.split(words)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([CONFIG, "--nodes", "3", "--gpus-per-node", "1"], "the world has 3 ranks"),
        ([CONFIG, "--nodes", "0"], "--nodes 0"),
        ([CONFIG], "--nodes N is needed"),
        ([CONFIG, "--nodes", "1", "--gpus-per-node", "0"], "--ranks-per-node"),
        (
            [CONFIG, "--nodes", "1", "--gpus-per-node", "4", "--ranks-per-node", "8"],
            "8 ranks per node exceed its 4 GPUs",
        ),
        ([CONFIG, "--nodes", "1", "--cpus-per-task", "0"], "--cpus-per-task 0 is not valid"),
        ([CONFIG, "--nodes", "1", "--time", "1 hour"], "--time 1 hour is not valid; minutes"),
        ([CONFIG, "--nodes", "1", "--partion", "x"], "--partion is not an option .* did you mean '--partition'"),
        ([CONFIG, "--node", "1"], "--node is not an option .* did you mean '--nodes'"),
        ([CONFIG, "--nodes", "1", "--gres", "x"], "--gres is not an option .* did you mean '--gpus-per-node'"),
        ([CONFIG, "-p", "x"], "-p is not an option .* did you mean '--partition'"),
        ([CONFIG, "--nodes", "1", "--sbatch", "--nodes=3"], "--sbatch has nodes, which `submit` reads itself"),
        ([CONFIG, "--nodes", "1", "--sbatch", "-N3"], "--sbatch has N, which `submit` reads itself"),
        ([CONFIG, "--nodes", "1", "--sbatch", "--signal=B:USR1@9"], "--sbatch has signal, which `submit` reads itself"),
        ([CONFIG, "--nodes", "1", "--sbatch", "--no-requeue"], "--no-requeue .* end with steps left.* MAX_RESTARTS=0"),
        ([CONFIG, "--nodes", "1", "--signal", "B:TERM@60"], "B:TERM@60 sends TERM: .* write --signal B:USR1@60"),
        ([CONFIG, "--nodes", "1", "--signal", "B:INT"], "B:INT sends INT: .* write --signal B:USR1@60"),
        ([CONFIG, "--nodes", "1", "--signal", "USR1@90"], "USR1@90 has no B:, .* write --signal B:USR1@90"),
        ([CONFIG, "--nodes", "1", "--signal", "B:USR1@1m"], "B:USR1@1m is not valid; write"),
        (
            [CONFIG, "--nodes", "1", "--time", "10", "--signal", "B:USR1@600"],
            "stop the run right after each start.*@150",
        ),
        ([CONFIG, "--nodes", "1", "--output", "none/%j.out"], "the folder none does not exist.* mkdir -p none"),
        ([CONFIG, "--nodes", "1", "--output", "slurm/%j/out"], "its folder depends on the job.* 0:53"),
        ([CONFIG, "--nodes", "1", "--output", "no-%x/out"], "the folder no-parallel-rl does not exist"),
        ([CONFIG, "--nodes", "1", "--sbatch", "gres=gpu:8"], "--sbatch gres=gpu:8 must begin with an option of sbatch"),
        ([CONFIG, "--nodes", "1", "--sbatch", "--comment='x"], "No closing quotation"),
        (["--script", "none.py", "--nodes", "1"], "--script none.py cannot be run: .*No such file"),
        (["--script", "slurm/env.sh", "--nodes", "1"], "--script slurm/env.sh cannot be run: invalid syntax"),
        (["--script", "tests/launch.py", "--nodes", "1", "--lr", "1"], "'--lr' is not .* after --"),
        (["--script", "tests/launch.py", "--nodes", "1", "--recipe", "grpo"], "takes the place of a config"),
        (["configs/none.yaml", "--nodes", "1"], "does not exist"),
        ([CONFIG, "--nodes", "1", "--data.train", "none.jsonl"], "none.jsonl"),
        ([CONFIG, "--nodes", "1", "--dump-step", "900000"], "--dump-step 900000 is not valid"),
        ([CONFIG, "--nodes", "1", "--run.seed", "{task}"], "{task} stands for the index of an array task.*add --array"),
        ([CONFIG, "--nodes", "1", "--array", "x"], "--array x is not valid"),
        ([CONFIG, "--nodes", "1", "--array", "0-3", "--run.seed", "{task}"], "to the same run.dir; add --run.dir"),
        ([CONFIG, "--nodes", "1", "--server-nodes", "1"], "--server-nodes 1, and SERVER_COMMAND is '': .* need both"),
        ([CONFIG, "--nodes", "1", "--server-command", "x"], "--server-nodes 0, and SERVER_COMMAND is 'x'"),
    ],
)
@pytest.mark.usefixtures("shell")
def test_submit_refuses_before_it_submits(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bash = str(Path(shutil.which("bash") or "").parent)
    monkeypatch.setenv("PATH", bash)
    assert main(["submit", *given]) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.usefixtures("shell")
def test_settings_of_the_shell_that_would_fail_on_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused, or warned of where the nodes may differ from the host of `submit`."""

    def said(nodes: int, **settings: str) -> str:
        with monkeypatch.context() as shell:
            for name, value in {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", **settings}.items():
                shell.setenv(name, value)
            sizes = ["--nodes", str(nodes), "--gpus-per-node", "0", "--ranks-per-node", "1"]
            folder = settings.get("RUN", str(ROOT / "runs/none"))
            status = main(["submit", CONFIG, *sizes, "--parallel={}", f"--run.dir={folder}", "--dry-run"])
        error = capsys.readouterr().err
        assert status == (2 if "parallel-rl: error" in error else 0)
        return error

    assert said(1) == ""
    assert check_shared("run.dir", "/home/me/run", 2) is None and check_shared("run.dir", "/tmpx/run", 2) is None
    for address in ("localhost", "127.0.1.1", "::1"):
        assert f"error: MASTER_ADDR = {address} (of your shell): each of 2 nodes" in said(2, MASTER_ADDR=address)
    assert "warning: MASTER_ADDR = host7 (of your shell): the ranks meet there" in said(2, MASTER_ADDR="host7")
    site = tmp_path / "site.conf"
    site.write_text("MASTER_PORT=29500\n")
    assert "warning: MASTER_PORT = 29500 (of the site's file)" in said(1, SITE_CONF=str(site))
    for python in (str(tmp_path), str(site), "no-such-python"):
        assert f"error: PYTHON = {python} (of your shell) is not a program" in said(1, PYTHON=python)
    for local in ("/tmp/run", "/dev/shm/a/run"):
        assert f"warning: run.dir = {local} is below {'/tmp' if 'tmp' in local else '/dev/shm'}, " in said(2, RUN=local)
        assert said(1, RUN=local) == ""
    assert "warning: LOG_DIR = /tmp/logs is below /tmp" in said(2, LOG_DIR="/tmp/logs")
    assert "error: SBATCH_NO_REQUEUE is incompatible" in said(1, SBATCH_NO_REQUEUE="1")
    path, image = f"{tmp_path}:/usr/bin:/bin", "CONTAINER_IMAGE"
    (tmp_path / "srun").write_text("#!/bin/sh\necho --container=path\n")
    (tmp_path / "srun").chmod(0o755)
    assert "warning: CONTAINER_IMAGE = x.sqsh, and srun on this host has no --container-image" in said(
        1, PATH=path, CONTAINER_IMAGE="x.sqsh"
    )
    (tmp_path / "srun").write_text("#!/bin/sh\necho '--container-image=[USER@][REGISTRY#]IMAGE'\n")
    assert said(1, PATH=path, **{image: "x.sqsh"}, PYTHON="python") == ""


@pytest.mark.usefixtures("shell")
def test_the_job_has_the_ranks_that_its_nodes_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the package's script, whose folder the job is told
    job = plan(Resources(2), ["c.yaml"])
    assert job.world == 16
    assert sorted(job.environment) == ["JOB_FILES", "SITE_CONF"]
    assert Path(job.command[2]).samefile(ROOT / "slurm" / "train.sbatch")
    assert plan(Resources(2, gpus_per_node=4), ["c.yaml"]).world == 8
    cpus = plan(Resources(2, gpus_per_node=0, ranks_per_node=3), ["c.yaml"])
    assert (cpus.world, cpus.environment["NPROC_PER_NODE"]) == (6, "3")
    site = tmp_path / "site.conf"
    monkeypatch.setenv("SITE_CONF", str(site))
    with pytest.raises(ValueError, match=f"SITE_CONF = {site} does not exist"):
        plan(Resources(2), ["c.yaml"])
    site.write_text("export SBATCH_GPUS_PER_NODE=2\n")
    assert plan(Resources(2), ["c.yaml"]).world == 4
    site.write_text("((\n")
    with pytest.raises(ValueError, match=r"site.conf cannot be read"):
        plan(Resources(2), ["c.yaml"])
    site.write_text("true\nmodule_that_is_not_there load x\ntrue\n")
    with pytest.raises(ValueError, match=r"line 2: status 127"):
        plan(Resources(2), ["c.yaml"])
    # what the site says holds in the job
    site.write_text("NPROC_PER_NODE=8\n")
    assert plan(Resources(2), ["c.yaml"]).world == plan(Resources(2, ranks_per_node=8), ["c.yaml"]).world == 16
    with pytest.raises(ValueError, match=r"--ranks-per-node 4 contradicts NPROC_PER_NODE = 8 in .*site.conf"):
        plan(Resources(2, ranks_per_node=4), ["c.yaml"])
    site.write_text("NPROC_PER_NODE=${NPROC_PER_NODE:-8}\n")
    assert plan(Resources(2, ranks_per_node=4), ["c.yaml"]).world == 8
    site.write_text("export SBATCH_EXPORT=NONE\n")
    with pytest.raises(ValueError, match="SBATCH_EXPORT = NONE keeps the settings from the job"):
        plan(Resources(2), ["c.yaml"])
    site.write_text("NPROC_PER_NODE=all\n")
    with pytest.raises(ValueError, match=r"NPROC_PER_NODE = 'all' is not valid"):
        plan(Resources(2), ["c.yaml"])


TIMES = {"30": 30, "30:10": 31, "2:00:00": 120, "1-2": 1560, "1-2:30": 1590, "1-2:30:01": 1591}


def test_time_limits_are_read_as_sbatch_reads_them() -> None:
    assert {time: seconds(time) for time in TIMES} == {time: 60 * minutes for time, minutes in TIMES.items()}
    assert [seconds(time) for time in ("UNLIMITED", "infinite", "0")] == [None] * 3
    for wrong in ("", "1h", "1-", "-5", "1:2:3:4", "1-2:3:4:5", "5 "):
        with pytest.raises(ValueError, match="M:S, H:M:S"):
            seconds(wrong)


@pytest.mark.usefixtures("shell")
def test_a_short_job_is_told_of_its_limit_in_its_last_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    def notice(time: str | None, **options: str) -> tuple[list[str], str | None]:
        job = plan(Resources(1, time=time, options=options), ["c.yaml"])
        return [word for word in job.command if word.startswith("--signal")], job.environment.get("NOTICE_SECONDS")

    assert notice("20") == (["--signal=B:USR1@300"], "300")
    assert notice("0:30") == (["--signal=B:USR1@15"], "15")
    assert notice("40") == notice(None) == notice("0") == ([], None)  # the script's
    assert notice("20", signal="B:USR1@60") == (["--signal=B:USR1@60"], "60")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "8")
    assert notice(None) == (["--signal=B:USR1@120"], "120")
    monkeypatch.setenv("SBATCH_SIGNAL", "B:USR1@45")
    assert notice(None) == ([], "45")


def _sbatch(folder: Path, code: str) -> str:
    """A PATH whose sbatch does this."""
    (folder / "sbatch").write_text(f"#!/bin/sh\n{code}\n")
    (folder / "sbatch").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.usefixtures("shell")
def test_the_record_of_a_job_is_there_before_the_job_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, seen = tmp_path / "runs" / "run", tmp_path / "seen"
    given = ["submit", CONFIG, "--nodes", "2", "--job-name", "mine", f"--run.dir={run}"]
    monkeypatch.setenv("PATH", _sbatch(tmp_path, f"echo no such account >&2; cp -r {run}/submitted {seen}; exit 1"))
    assert main(given) == 2
    assert "sbatch refuses: no such account" in capsys.readouterr().err
    assert sorted(path.name for path in seen.rglob("*.*")) == [
        *(
            "cause.sh",
            "command.sh",
            "config.yaml",
            "env.sh",
            "job.sh",
            "server.sh",
            "site.conf",
            "torchrun.py",
            "train.sbatch",
        ),
        "with_server.sbatch",
    ]
    assert not (tmp_path / "runs").exists()
    (run / "submitted").mkdir(parents=True)  # of another job
    assert main(given) == 2
    assert [path.name for path in run.iterdir()] == ["submitted"]
    capsys.readouterr()
    monkeypatch.setenv("PATH", _sbatch(tmp_path, "echo Submitted batch job 17"))
    assert main(given) == 0
    [record] = (run / "submitted").iterdir()
    assert record.name.endswith("-17")
    _, command, said = capsys.readouterr().out.splitlines()
    assert (record / "command.sh").read_text() == f"cd {ROOT}\n{command}\n"
    logs = "its log is slurm-mine-17.out, the ranks' logs are in runs/slurm/17"
    assert said == f"Submitted batch job 17; {logs}; its command and what it runs are in {record}"
