"""A run that is told to stop when its last step is under way is complete: nothing of it is to be queued again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel_rl.cluster import heartbeat, preemption
from parallel_rl.testing.pool import run_world
from tests.launch import rows
from tests.training.helpers import run, train_rows

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


def last_step(prompt: str, completion: str, answer: str) -> float:
    """A checker that sends the run a signal in its last step."""
    if heartbeat.step_name() == "rl step 2":
        os.kill(os.getpid(), int(os.environ["TEST_SIGNAL"]))
    return len(completion) / 4


def _train(given: list[str], job: str, number: int) -> None:
    os.environ.pop("WORLD_SIZE", None)
    os.environ.update(PARALLEL_RL_JOB_DIR=job, TEST_SIGNAL=str(number))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    preemption.listen()
    assert len(train_rows(0, given)) == 2


def _nothing(rank: int) -> None:
    pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_in_the_last_step_finds_a_complete_run(number: signal.Signals, tmp_path: Path) -> None:
    run_world(1, _nothing)  # starts the pool's server, from which the process below is forked
    folder, job = tmp_path / "run", tmp_path / "job"
    job.mkdir()
    given = run("grpo_arithmetic.yaml", run__dir=folder, reward=f"{__name__}:last_step", **SMALL)
    process = multiprocessing.get_context("forkserver").Process(target=_train, args=(given, str(job), int(number)))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert list(job.iterdir()) == []  # no REQUEUE
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert (folder / "checkpoints" / "step_000002" / "manifest.json").is_file() and (folder / "curves.png").is_file()
