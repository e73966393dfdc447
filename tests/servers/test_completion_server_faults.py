"""Completion servers that fail, are slow or down: what is tried again, elsewhere, and when it ends."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from parallel_rl.servers.completion_server import CompletionServerError
from tests.servers.policy_server import Policy, openai
from tests.servers.server import serve
from tests.servers.test_completion_server import PROMPTS, SAMPLING, client, well


def test_the_least_loaded_server_is_asked_and_another_after_a_failure() -> None:
    def slowly(number: int, body: dict) -> tuple[int, object]:
        time.sleep(0.2)
        return well(number, body)

    with serve(slowly) as slow, serve(well) as fast, serve(lambda number, body: (503, b"busy")) as busy:
        found = client(slow.root, fast.root, concurrency=2).complete(PROMPTS, range(10))
        assert len(found) == 10 and 1 <= len(slow.requests) < len(fast.requests)
        count = len(fast.requests)
        assert client(busy.root, fast.root, retries=1, concurrency=1).complete(PROMPTS, range(10)) == found
        assert len(fast.requests) == count + 10 and len(busy.requests) >= 1


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_failure_in_passing_is_tried_again(status: int) -> None:
    def recovers(number: int, body: dict) -> tuple[int, object]:
        return (status, b"busy") if number < 2 else well(number, body)

    with serve(recovers) as server:
        found = client(server.root, retries=2, backoff=0.05, concurrency=1).complete(PROMPTS[:2], range(2))
        assert len(found) == 2 and len(server.requests) == 4
        assert server.times[1] - server.times[0] >= 0.05 and server.times[2] - server.times[1] >= 0.1
    with serve(well) as server:
        assert client(server.root).complete(PROMPTS[:2], range(2)) == found


def test_a_lost_connection_and_a_late_answer_are_tried_again() -> None:
    def unsteady(number: int, body: dict) -> tuple[int, object]:
        if number == 0:
            raise ConnectionResetError  # nothing comes back
        if number == 1:
            time.sleep(0.6)
        return well(number, body)

    with serve(unsteady) as server:
        found = client(server.root, timeout=0.3, retries=2).complete(PROMPTS[:1], [0])
        assert len(server.requests) == 3
    with serve(well) as server:
        assert client(server.root).complete(PROMPTS[:1], [0]) == found


def test_an_aborted_generation_is_tried_again() -> None:
    def aborts(number: int, body: dict) -> tuple[int, object]:
        found = openai(Policy(), body)
        if number < 2:
            found["choices"][0]["finish_reason"] = "abort"
        return 200, found

    with serve(aborts) as server:
        client(server.root, retries=2).complete(PROMPTS[:1], [7])
        assert len(server.requests) == 3
    with serve(aborts) as server, pytest.raises(CompletionServerError, match=r"attempt 2 of 2: sample 7 .*was aborted"):
        client(server.root, retries=1).complete(PROMPTS[:1], [7])


def test_a_slow_server() -> None:
    release = threading.Event()

    def never(number: int, body: dict) -> tuple[int, object]:
        release.wait(20)
        return well(number, body)

    with serve(never) as server:
        with pytest.raises(CompletionServerError, match=r"attempt 2 of 2: no answer in 0\.2 s"):
            client(server.root, timeout=0.2, retries=1).complete(PROMPTS[:2], range(2))
        release.set()


def test_a_server_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(CompletionServerError, match=rf"{url}/v1/completions, attempt 3 of 3: no connection: .*refused"):
        client(url, retries=2, wait=0).complete(PROMPTS[:1], [0])


def test_one_failure_ends_the_others() -> None:
    def fails(number: int, body: dict) -> tuple[int, object]:
        return (400, b"bad") if body["prompt"] == [PROMPTS[3]] else (503, b"busy")

    with serve(fails) as server:
        start = time.monotonic()
        with pytest.raises(CompletionServerError, match="status 400"):
            client(server.root, retries=50, backoff=60, concurrency=4).complete(PROMPTS, range(10))
        assert time.monotonic() - start < 50 and len(server.requests) < 10


def test_a_failed_call_ends_no_other() -> None:
    """Every later call failed with "another request failed", however well the server was again."""

    def fails_once(number: int, body: dict) -> tuple[int, object]:
        return (400, b"bad") if number == 0 else well(number, body)

    with serve(fails_once) as server:
        ours = client(server.root, concurrency=1)
        with pytest.raises(CompletionServerError, match="status 400"):
            ours.complete(PROMPTS[:1], [0])
        assert len(ours.complete(PROMPTS[:2], range(2))) == 2
        ours.close()
        with pytest.raises(CompletionServerError, match="not sent, because another request failed"):
            ours.complete(PROMPTS[:1], [0])


def test_closing_ends_calls_under_way() -> None:
    with serve(lambda number, body: (503, b"busy")) as server:
        ours = client(server.root, retries=50, backoff=5)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ours.complete, PROMPTS[:1], [0])
            while not server.requests:
                time.sleep(0.01)
            ours.close()
            with pytest.raises(CompletionServerError, match="status 503"):
                asked.result(4)


@pytest.mark.parametrize("faults", [2, 3])
def test_a_sample_without_log_probs_is_drawn_again_by_other_seeds(faults: int) -> None:
    """The other sample of the request stays the one that was drawn first."""
    expected = Policy()

    def drawn(prompt: Sequence[int], seed: int) -> tuple[int, ...]:
        return tuple(expected.draw(prompt, seed, SAMPLING.max_tokens, SAMPLING.temperature)[0])

    def unsure(number: int, body: dict) -> tuple[int, object]:
        found = openai(expected, body)
        choice = next(choice for choice in found["choices"] if choice["index"] == 1)
        if number < faults:
            choice["logprobs"]["token_logprobs"][0] = [None, -9999.0, math.nan][number]
        return 200, found

    again = replace(SAMPLING, redraws=2)
    with serve(unsure) as server:
        first, second = (
            future.result()
            for future in client(server.root, batch_size=2, sampling=again, concurrency=1).submit(PROMPTS[:2], [7, 8])
        )
        seeds = [body["seed"] for body in server.requests]
    assert len(set(seeds)) == 3
    assert first.fault is None and first.tokens == drawn(PROMPTS[0], seeds[0])
    if faults == 3:
        assert math.isnan(second.logprobs[0]) and "sample 8 (choice 1 of 2): the log-prob of token 0" in str(
            second.fault
        )
    else:
        assert second.fault is None
        assert second.tokens == drawn(PROMPTS[1], seeds[2])
