"""A server that refuses connections in the middle of a run: it is waited for; then all is saved, and a restart asked for."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from parallel_rl.cluster import progress
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.rollouts.sharing import wait_together
from tests.forked import command, run_ranks
from tests.servers.engine_server import EngineServer, serve_engine
from tests.servers.server import Answer, Server, lengths, serve
from tests.training.helpers import logged_rows, train_rows
from tests.training.rollouts.test_in_step import LLAMA
from tests.training.rollouts.test_remote import SAMPLES, arguments, train, well

FOLDER = "PARALLEL_RL_JOB_DIR"


def _for_a_job(rank: int, given: list[str], job: str) -> list[dict]:
    os.environ[FOLDER] = job
    try:
        return train_rows(rank, given)
    finally:
        del os.environ[FOLDER]


def _ending(number: int, then: Callable[[], None], answers: Answer) -> tuple[Answer, list[Server]]:
    """Answers of the server in the list, which ends with so many requests; `then` is called half a second later."""
    found: list[Server] = []

    def ends(count: int, body: dict) -> tuple[int, object]:
        if count == number:
            found[0].stop()
            threading.Timer(0.5, then).start()
        return answers(count, body)

    return ends, found


@pytest.mark.slow
@pytest.mark.parametrize("away", ["rollouts", "rewards"])
def test_the_run_is_saved_to_be_queued_again_and_goes_on_to_the_same_bits(away: str, tmp_path: Path) -> None:
    """The server ends in the middle of four steps: for good, or until a stop is asked for. There is no checkpoint yet."""
    run, job, layout = tmp_path / "run", tmp_path / "job", "DP 2"
    job.mkdir()
    if away == "rollouts":
        options, cause = (
            "wait: 0.3, ahead: 1",
            r"a server that is away \((rank \d: )?completion server .* for 0.3 s .*\)",
        )
        answers, found = _ending(2 * SAMPLES + 3, lambda: None, well)
    else:
        options, cause = "ahead: 1", r"the file STOP \(rank \d\)"
        answers, found = _ending(3, (job / "STOP").touch, lengths)
    with serve(lengths) as scorer, serve(well) as server:
        expected = train(tmp_path / "whole", server, layout, options, reward=scorer.url, rl__steps=4)
    with (
        serve(lengths if away == "rollouts" else answers) as scorer,
        serve(answers if away == "rollouts" else well) as server,
    ):
        found.append(server if away == "rollouts" else scorer)
        [done, _] = run_world(
            2, _for_a_job, arguments(run, server, layout, options, reward=scorer.url, rl__steps=4), str(job)
        )
    assert 0 < len(done) < 4 and done == expected[: len(done)]
    goes_on = f"the same command resumes from {run}/checkpoints/step_{len(done):06d}"
    assert re.fullmatch(
        rf"stopped by {cause} after rl step {len(done)} of 4; {re.escape(goes_on)}\n", (job / "REQUEUE").read_text()
    )
    with serve(lengths) as scorer, serve(well) as server:
        assert done + train(run, server, layout, options, reward=scorer.url, rl__steps=4) == expected


@pytest.mark.slow
def test_samples_in_flight_at_a_server_that_is_away_do_not_keep_a_stopped_run_from_its_save(tmp_path: Path) -> None:
    """The server ends while it draws those of the third step, and the stop comes before the second is over."""
    run, job = tmp_path / "run", tmp_path / "job"
    job.mkdir()
    found: list[Server] = []

    def ends(count: int, body: dict) -> tuple[int, object]:
        if count == 2 * SAMPLES + 3:
            (job / "STOP").touch()
            found[0].stop()
        return well(count, body)

    options = {"options": "ahead: 1", "rl__steps": 3, "run__timeout": 2}
    with serve(well) as server:
        expected = train(tmp_path / "whole", server, **options)
    with serve(ends) as server:
        found.append(server)
        # on a rank that ends: in the pool's, the threads that wait for the server would look for it as long as the tests last
        settings = {FOLDER: str(job), "PARALLEL_RL_IMPORT": "tests.training.helpers"}
        ended = run_ranks(tmp_path, command, ["train", *arguments(run, server, **options)], ranks=1, **settings)
    done = logged_rows(run)
    assert ended.statuses == [0] and done == expected[:2], ended
    assert f"resumes from {run}/checkpoints/step_000002" in (job / "REQUEUE").read_text()
    with serve(well) as server:
        assert done + train(run, server, **options) == expected


def test_before_the_first_step_the_job_is_queued_again_too(tmp_path: Path) -> None:
    """Every rank ends with the cause, and the marker is there."""
    with serve_engine(EngineServer()) as server:
        given = arguments(tmp_path / "run", server, "TP 2", "update: vllm, wait: 0.2", **LLAMA)
    with pytest.raises(WorldError) as caught:
        run_world(2, _for_a_job, given, str(tmp_path))
    for error in caught.value.errors.values():
        assert re.search(rf"completion server {server.root}/v1/models: .* refused, for 0.2 s", error)
    assert sorted(caught.value.errors) == [0, 1] and "for 0.2 s" in (tmp_path / "REQUEUE").read_text()


def _looks(rank: int, timeout: float) -> int:
    waited: Future[None] = Future()
    if rank == 1:
        threading.Timer(0.6, waited.set_result, (None,)).start()
    before = progress.moves()
    assert wait_together([waited] if rank else [], timeout)
    return progress.moves() - before


def test_ranks_look_at_each_other_within_any_timeout() -> None:
    """`run.timeout` bounds one collective: while a server works, none may wait longer in it, nor look as if it stood still."""
    assert all(count >= 2 for count in run_world(2, _looks, 1.0))  # one, if none looked before the end
