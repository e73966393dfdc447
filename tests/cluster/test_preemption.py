"""A run that is told to stop, and one that is killed: what it leaves, what it says, and that it goes on to the same bits."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from parallel_rl.cluster.preemption import failed
from parallel_rl.experience import register_reward
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.reporting.run_log import write_whole
from tests.cluster.ranks import Ranks
from tests.launch import Launch
from tests.training.checkpointing.saves import largest_file
from tests.training.helpers import DATA, logged_rows, run, train_rows

SMALL = {
    "model__hidden": 32,
    "batch__micro_batch_size": 16,
    "evaluation": "{samples: 1, every: 4}",
    "warmup": "{steps: 3, batch_size: 16, optimizer: {lr: 3e-3, warmup_steps: 2}}",
    "rl__steps": 6,
    "rl__prompts": 4,
    "rl__group_size": 4,
    "rl__updates": 2,
    "run__checkpoint_every": 2,
    "run__keep_checkpoints": 20,
}
FOLDER = "PARALLEL_RL_JOB_DIR"
_calls = 0


def arguments(folder: Path, **more: object) -> list[str]:
    """A run of 9 steps in all, on 8 held-out prompts."""
    held_out = folder.parent / "held_out.jsonl"
    lines = (DATA / "arithmetic_held_out.jsonl").read_text().splitlines(keepends=True)
    held_out.write_text("".join(lines[:8]))
    settings = {"parallel": "{}", "reward": "slow", "data__held_out": held_out, "run__dir": folder}
    return run("grpo_arithmetic.yaml", **{**settings, **SMALL, **more})


@register_reward("slow")
def slow(prompt: str, completion: str, answer: str) -> float:
    """Takes so long that a fault finds the run at work; even an untrained policy's samples differ under it."""
    time.sleep(float(os.environ.get("TEST_SECONDS", "0")))
    return len(completion) / 4


@register_reward("broken")
def broken(prompt: str, completion: str, answer: str) -> float:
    """Fails on rank 1, some steps later."""
    global _calls
    _calls += 1
    if os.environ["RANK"] == "1" and _calls > 30:
        raise ZeroDivisionError("of a checker")
    return len(completion) / 4


@register_reward("asking")
def asking(prompt: str, completion: str, answer: str) -> float:
    """Asks the run to stop, some steps later."""
    global _calls
    _calls += 1
    if _calls == 30:
        (Path(os.environ[FOLDER]) / "STOP").touch()
    return len(completion) / 4


def _train(rank: int, given: list[str]) -> list[dict[str, float | int | str]]:
    """As a function of this module it has the rank import it, and its rewards with it."""
    return train_rows(rank, given)


def _train_for_a_job(rank: int, given: list[str], job: str) -> list[dict[str, float | int | str]]:
    global _calls
    os.environ[FOLDER], _calls = job, 0
    try:
        return train_rows(rank, given)
    finally:
        del os.environ[FOLDER]


@pytest.mark.slow
def test_the_file_stop_ends_a_run_between_two_steps_and_it_goes_on_to_the_same_bits(
    whole: Path, tmp_path: Path
) -> None:
    stopped, job, expected = tmp_path / "stopped", tmp_path / "job", logged_rows(whole)
    job.mkdir()
    [done, other] = run_world(2, _train_for_a_job, arguments(stopped, reward="asking"), str(job))
    assert 3 < len(done) < 9 and other == done
    assert logged_rows(stopped) == expected[: len(done)]
    text = (job / "REQUEUE").read_text()
    assert {path.name for path in job.iterdir()} == {"STOP", "REQUEUE"}
    goes_on = f"the same command resumes from {stopped}/checkpoints/step_{len(done):06d}"
    assert re.fullmatch(rf"stopped by the file STOP \(rank \d\) after rl step \d of 6; {re.escape(goes_on)}\n", text)
    # what asks still stands there: the run stops before its first step, and there is nothing to save again
    before = sorted((stopped / "checkpoints").iterdir())
    assert run_world(2, _train_for_a_job, arguments(stopped), str(job)) == [[], []]
    assert sorted((stopped / "checkpoints").iterdir()) == before
    (job / "STOP").unlink()
    (job / "REQUEUE").unlink()
    [rest, _] = run_world(2, _train_for_a_job, arguments(stopped), str(job))
    assert done + rest == expected == logged_rows(stopped)
    assert list(job.iterdir()) == []  # no step is left: nothing is to be queued again


@register_reward("filling")
def filling(prompt: str, completion: str, answer: str) -> float:
    """Fills the disk, some steps later, such that the next row of metrics does not fit in."""
    global _calls
    _calls += 1
    if _calls == 30 and dist.get_rank() == 0:
        size = (Path(os.environ[FOLDER]) / "metrics.jsonl").stat().st_size + 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return len(completion) / 4


def _train_on_a_full_disk(rank: int, given: list[str], folder: str) -> None:
    with largest_file(2**40):  # until `filling`
        _train_for_a_job(rank, given, folder)


@pytest.mark.slow
def test_a_row_that_cannot_be_written_is_an_error_on_all_ranks_and_nothing_is_lost(whole: Path, tmp_path: Path) -> None:
    full, expected = tmp_path / "full", logged_rows(whole)
    with pytest.raises(WorldError) as failure:
        run_world(2, _train_on_a_full_disk, arguments(full, reward="filling"), str(full))
    assert sorted(failure.value.errors) == [0, 1]
    for error in failure.value.errors.values():
        assert "the row of rl step" in error and "could not be written in" in error
        assert "rank 0: OSError: [Errno 27] File too large" in error
    written = logged_rows(full)
    assert 3 < len(written) < 9 and written == expected[: len(written)]
    [rest, _] = run_world(2, _train, arguments(full))
    assert rest and rest == expected[-len(rest) :] and logged_rows(full) == expected


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, "first")
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        write_whole(path, "second" * 1000)
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing befell."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_world(2, _train, arguments(folder))
    assert len(logged_rows(folder)) == 9
    return folder


@pytest.fixture
def chance() -> random.Random:
    """The seed of what befalls a run is printed with a failure."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


def settings_of(folder: Path) -> dict[str, str]:
    """Return the variables of a run: its job's folder, and the module of the rewards above."""
    (folder.parent / "job").mkdir(exist_ok=True)
    return {FOLDER: str(folder.parent / "job"), "TEST_SECONDS": "0.005", "PARALLEL_RL_IMPORT": __name__}


def launch(folder: Path) -> Launch:
    """Start a run under torchrun, with a minute to end: its ranks may still import, on a busy machine."""
    settings = {**settings_of(folder), "PET_SHUTDOWN_TIMEOUT": "60"}
    return Launch(folder, arguments(folder, run__timeout=60.0), env=settings)


def fork(folder: Path, timeout: float = 60.0) -> Ranks:
    return Ranks(folder, arguments(folder, run__timeout=timeout), env=settings_of(folder))


def at_some_moment(run: Launch | Ranks, chance: random.Random, rank: int, *, from_row: int = 0) -> str:
    """Waits until then: while it starts, or in one of the steps, or in a save."""
    row, seconds = chance.randrange(from_row, 8), chance.uniform(0, 0.3)
    run.until(lambda: run.listens(rank), "the ranks")
    if row:
        run.until_rows(row)
    time.sleep(seconds)
    text = f"rank {rank}, {seconds:.3f} s after row {row}"
    print(text)
    return text


def tensors(folder: Path) -> dict[str, object]:
    """All that the last checkpoint holds, flat: weights, moments, random states."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder / "checkpoints" / "step_000009", folder / "last.pt")
    return dict(_flat(torch.load(folder / "last.pt", weights_only=False)))


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{name}/{index}")
    elif isinstance(value, io.BytesIO):
        yield name, value.getvalue()
    elif isinstance(value, torch.Tensor | np.ndarray):
        array = np.asarray(value)
        yield name, (str(array.dtype), array.shape, array.tobytes())
    else:
        yield name, value


def goes_on(folder: Path, whole: Path) -> None:
    """The same run goes on to the same rows and the same weights, to the bit."""
    job = folder.parent / "job"
    (job / "REQUEUE").unlink(missing_ok=True)
    run_world(2, _train_for_a_job, arguments(folder), str(job))
    assert logged_rows(folder) == logged_rows(whole)
    assert tensors(folder) == tensors(whole)
    assert list(job.iterdir()) == []


def assert_stopped(name: str, said: str, job: Path) -> None:
    assert f"stopped by {name} (rank " in said, said
    assert "error" not in said.replace("errors", ""), said
    assert (job / "REQUEUE").exists()


@pytest.mark.slow
def test_sigterm_to_torchrun_stops_a_run_at_any_moment(whole: Path, tmp_path: Path, chance: random.Random) -> None:
    """May take half a minute: torchrun starts two ranks, which import all before a signal can find them at work."""
    folder, rank = tmp_path / "run", chance.randrange(2)
    with launch(folder) as run:
        at_some_moment(run, chance, rank)
        # as Slurm does: to torchrun, which hands it on, and to the ranks themselves, again and again
        run.send(signal.SIGTERM, None)
        for _ in range(20):
            for pid in run.pids().values():
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)
        assert run.wait() != 0, run.said()  # torchrun itself fails of SIGTERM
        assert_stopped("SIGTERM", run.said(), tmp_path / "job")
        assert run.pids() == {}
    goes_on(folder, whole)


@pytest.mark.slow
def test_sigusr1_to_a_rank_stops_a_run_at_any_moment(whole: Path, tmp_path: Path, chance: random.Random) -> None:
    folder, rank = tmp_path / "run", chance.randrange(2)
    with fork(folder) as run:
        at_some_moment(run, chance, rank)
        run.send(signal.SIGUSR1, rank)
        assert [run.wait(number) for number in range(2)] == [0, 0], run.said()
    assert_stopped("SIGUSR1", run.said(), tmp_path / "job")
    goes_on(folder, whole)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on(whole: Path, tmp_path: Path, chance: random.Random) -> None:
    folder, rank = tmp_path / "run", chance.randrange(2)
    with fork(folder) as run:
        at_some_moment(run, chance, rank, from_row=1)
        run.send(signal.SIGKILL, rank)
        assert run.wait(1 - rank) == 1
        assert f"parallel-rl: error (rank {1 - rank}, " in run.said(), run.said()
        assert f"rank {rank} on " in run.said() and "is MISSING" in run.said(), run.said()
        assert not (tmp_path / "job" / "REQUEUE").exists()
    goes_on(folder, whole)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_within_the_timeout(tmp_path: Path, chance: random.Random) -> None:
    """May take twenty seconds: 15 seconds of waiting tell a rank that hangs from a slow one."""
    folder, rank = tmp_path / "run", chance.randrange(2)
    with fork(folder, timeout=15) as run:
        at_some_moment(run, chance, rank, from_row=1)
        run.send(signal.SIGSTOP, rank)
        assert run.wait(1 - rank) == 1
        assert f"parallel-rl: error (rank {1 - rank}, " in run.said() and f"rank {rank} on " in run.said(), run.said()


def _fail(rank: int, given: list[str]) -> tuple[int, str]:
    """Return the exit status of a run that fails, and what the command prints of it."""
    global _calls
    _calls = 0
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            train_rows(rank, given)
        except ValueError as error:
            return failed(error), text.getvalue()
    return 0, text.getvalue()


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_with_its_cause(tmp_path: Path) -> None:
    for rank, (status, text) in enumerate(run_world(2, _fail, arguments(tmp_path / "run", reward="broken"))):
        said = [line for line in text.splitlines() if f"parallel-rl: error (rank {rank}, rl step " in line]
        assert status != 0 and len(said) == 1 and "rank 1: reward 'broken' of sample " in said[0], text
        assert "ZeroDivisionError: of a checker" in said[0]
