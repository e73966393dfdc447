"""How a run ends: one that is told to stop in its last step is complete; one that something else ended is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.cli import main
from parallel_rl.cluster import preemption, progress
from parallel_rl.cluster.preemption import failed
from parallel_rl.experience import register_reward
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.trainer import train
from tests.forked import run_ranks
from tests.launch import UNCOMPILED
from tests.training.helpers import ROOT, logged_rows, run, train_rows

SMALL = {
    "parallel": "{}",
    "model__hidden": 16,
    "evaluation": "null",
    "data__held_out": "null",
    "data__examples": "null",
    "warmup": "null",
    "rl__steps": 2,
    "rl__prompts": 4,
    "rl__group_size": 2,
    "rl__updates": 1,
}


@register_reward("last_step")
def last_step(prompt: str, completion: str, answer: str) -> float:
    """A checker that sends the run a signal in its last step."""
    if progress.step_name() == "rl step 2":
        os.kill(os.getpid(), int(os.environ["TEST_SIGNAL"]))
    return len(completion) / 4


def _train(given: list[str], job: str, number: int) -> None:
    os.environ.pop("WORLD_SIZE", None)
    os.environ.update(PARALLEL_RL_JOB_DIR=job, TEST_SIGNAL=str(number))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    preemption.listen()
    assert len(train(load_config(given[0], given[1:])).rows) == 2


def _train_rows(rank: int, given: list[str]) -> object:
    """As a function of this module it has the rank import it, and its rewards with it."""
    return train_rows(rank, given)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_in_the_last_step_finds_a_complete_run(number: signal.Signals, tmp_path: Path) -> None:
    folder, job = tmp_path / "run", tmp_path / "job"
    job.mkdir()
    given = run("grpo_arithmetic.yaml", run__dir=folder, reward="last_step", **SMALL)
    done = run_ranks(tmp_path, _train, given, str(job), int(number), ranks=1)
    assert done.statuses == [0], done
    assert list(job.iterdir()) == []  # no REQUEUE
    assert [row["step"] for row in logged_rows(folder)] == [1, 2]
    assert (folder / "checkpoints" / "step_000002" / "manifest.json").is_file() and (folder / "curves.png").is_file()


_seen: list[int] = []


@register_reward("gloo_threads")
def gloo_threads(prompt: str, completion: str, answer: str) -> float:
    """A checker that counts the threads of the process groups."""
    _seen.append(_threads())
    return len(completion) / 4


def _threads() -> int:
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop\n")


def _run_command(given: list[str]) -> None:
    os.environ.pop("WORLD_SIZE", None)
    assert main(["train", *given]) == 0
    assert _seen[0] > 0 == _threads(), (_seen[0], _threads())


def test_a_run_leaves_no_thread_behind(tmp_path: Path) -> None:
    """A thread of a group that Megatron still knew freed a tensor as the interpreter ended: SIGABRT after a complete run."""
    given = run("grpo_arithmetic.yaml", run__dir=tmp_path / "run", reward="gloo_threads", **SMALL)
    done = run_ranks(tmp_path, _run_command, given, ranks=1)
    assert done.statuses == [0], done


@register_reward("leaves")
def leaves(prompt: str, completion: str, answer: str) -> float:
    """A checker that a stranger wrote as a script."""
    if os.environ["RANK"] == "1":
        sys.exit(0)
    return 1.0


def test_a_reward_that_exits_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Exit status 0 with no row written looked like a completed run, and the other ranks waited for their timeout."""
    given = run("grpo_arithmetic.yaml", run__dir=tmp_path, reward="leaves", **SMALL)
    with pytest.raises(WorldError) as failure:
        run_world(2, _train_rows, given)
    assert sorted(failure.value.errors) == [0, 1]
    assert all("rank 1: SystemExit: 0" in text for text in failure.value.errors.values())


def test_an_exit_before_the_end_has_a_status_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert failed(SystemExit(0)) == 1
    assert "error: sys.exit(0) was called before the run was done" in capfd.readouterr().err


def _multiplied() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


def _ours() -> None:
    raise_on_all_ranks(_multiplied, what="the product")


ENDS_BADLY = """
import atexit, os
class Thread:
    def __del__(self):
        os.abort()
thread = Thread()
atexit.register(print, "closed")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status", "cause"),
    [
        (["parallel_rl.cli", "train", "nowhere.yaml", "--import", "ends_badly"], 2, "nowhere.yaml does not exist"),
        (["parallel_rl.cli.loop", "--gate", "5", "loop.py"], 1, "KeyError: 'lr'"),
    ],
)
def test_a_process_that_fails_has_its_own_status(words: list[str], status: int, cause: str, tmp_path: Path) -> None:
    """An object stands in for the threads of process groups that a failure leaves: they abort the interpreter in its end, and
    torchrun reported a SIGABRT in place of the error. What is registered for the end still runs."""
    (tmp_path / "ends_badly.py").write_text(ENDS_BADLY)
    (tmp_path / "loop.py").write_text("import ends_badly\nraise KeyError('lr')\n")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", **UNCOMPILED}
    done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "closed\n")
    assert done.stderr.endswith(f"{cause}\n")


def test_what_torch_raises_keeps_its_type_and_its_traceback(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank out of memory said only "could not create a primitive": its error ends in a line of this package."""
    monkeypatch.setattr("parallel_rl.cluster.preemption._OURS", str(Path(__file__).parent))
    for work, said in ((_multiplied, "error: RuntimeError: mat1 and mat2"), (_ours, "mat1 and mat2")):
        with pytest.raises(RuntimeError) as caught:
            work()
        assert failed(caught.value) == 1
        text = capfd.readouterr().err
        assert said in text and "torch.ones(2, 3) @" in text
    meant = RuntimeError("too small")
    with pytest.raises(RuntimeError) as caught:
        raise meant
    assert failed(caught.value) == 1
    assert capfd.readouterr().err == "parallel-rl: error: too small\n"


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_run_in_one_line() -> None:
    """`parallel-rl train ... | head`: rich raises SystemExit(1) from the closed pipe, a traceback in itself."""
    code = (
        "import sys\nfrom rich.console import Console\nfrom parallel_rl.cluster.preemption import failed\nsys.stdin.read()\n"
        "try:\n    Console().print('a row')\nexcept SystemExit as error:\n    sys.exit(failed(error))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == (
        "parallel-rl: error: nobody reads its output any more (of a pipe such as `| head`); write it to a file instead\n"
    )
    assert process.wait(60) == 1
