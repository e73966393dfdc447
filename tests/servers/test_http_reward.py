"""Rewards by HTTP, from a real server that is well, slow, wrong, failing or gone."""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from parallel_rl.experience import HTTPReward, HTTPRewardConfig, RewardServerError, reward_function
from parallel_rl.servers import http_client
from parallel_rl.servers.http_client import (
    Poster,
    ServerAwayError,
    ServerError,
    Workers,
    any_server_away,
    read_json,
)
from tests.servers.server import Answer, lengths, serve


def texts(count: int) -> tuple[list[str], list[str], list[str]]:
    return [f"q{i}" for i in range(count)], ["x" * i for i in range(count)], [f"a{i}" for i in range(count)]


def test_batches_in_order_with_what_servers_read() -> None:
    with serve(lengths) as server:
        reward = HTTPReward(HTTPRewardConfig(server.url, batch_size=4, concurrency=3))
        found = reward(*texts(10))
        assert found.dtype == torch.float64 and found.tolist() == list(range(10))
        assert sorted(len(body["query"]) for body in server.requests) == [2, 4, 4]
        body = min(server.requests, key=lambda body: body["prompts"])
        assert body["prompts"] == ["q0", "q1", "q2", "q3"] and body["labels"] == ["a0", "a1", "a2", "a3"]
        assert body["query"] == ["q0", "q1x", "q2xx", "q3xxx"]
        assert reward([], [], []).shape == (0,)
        assert reward_function(server.url)(["Frage"], ["Größe 数 \U0001f600"], [""]).tolist() == [9]
        assert reward_function({"url": server.url, "batch_size": 1})(*texts(2)).tolist() == [0, 1]


def test_a_server_may_return_fields_beside_the_reward() -> None:
    """It gets the completions' ids, where values of tokens are needed."""

    def graded(number: int, body: dict) -> tuple[int, object]:
        scores = [{"reward": len(ids), "bonus": [0.5] * len(ids)} for ids in body["tokens"]]
        return 200, {"rewards": [*scores[:-1], 7]}

    with serve(graded) as server:
        found = HTTPReward(HTTPRewardConfig(server.url)).score(*texts(3), tokens=[[1], [2, 3], [4]])
    assert found.checked().tolist() == [1, 2, 7]
    assert found.fields == [{"bonus": [0.5]}, {"bonus": [0.5, 0.5]}, {}]


def test_requests_run_at_once_but_not_more_than_allowed() -> None:
    def slowly(number: int, body: dict) -> tuple[int, object]:
        time.sleep(0.1)
        return lengths(number, body)

    with serve(slowly) as server:
        HTTPReward(HTTPRewardConfig(server.url, batch_size=1, concurrency=3))(*texts(6))
        assert server.most_at_once == 3


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_failure_in_passing_is_tried_again_later(status: int) -> None:
    times: list[float] = []

    def recovers(number: int, body: dict) -> tuple[int, object]:
        times.append(time.monotonic())
        return (status, b"busy") if number < 2 else lengths(number, body)

    with serve(recovers) as server:
        found = HTTPReward(HTTPRewardConfig(server.url, retries=2, backoff=0.05))(*texts(3))
    assert found.tolist() == [0, 1, 2]
    first, second = times[1] - times[0], times[2] - times[1]
    assert first >= 0.05 and second >= 0.1


@pytest.mark.parametrize(
    ("answer", "message", "requests"),
    [
        (lambda n, b: (500, b"out of memory"), r"attempt 3 of 3: status 500 Internal Server Error: out of memory", 3),
        (lambda n, b: (404, b"no such model"), r"attempt 1 of 3: status 404 Not Found: no such model", 1),
        (lambda n, b: (302, b""), r"attempt 1 of 3: status 302", 1),
        (lambda n, b: (200, {"rewards": [1.0]}), "attempt 1 of 3: 1 rewards came back for 2 samples", 1),
        (lambda n, b: (200, {"rewards": [1.0, 2, 3]}), "3 rewards came back for 2 samples", 1),
        (lambda n, b: (200, {"rewards": [1.0, "high"]}), "reward 1 of 2 is 'high'; a finite number is needed", 1),
        (lambda n, b: (200, {"rewards": [None, 1.0]}), "reward 0 of 2 is None", 1),
        (lambda n, b: (200, {"rewards": [1.0, {"reward": "x"}]}), "reward 1 of 2 is 'x'", 1),
        (lambda n, b: (200, {"rewards": [True, 1.0]}), "reward 0 of 2 is True", 1),
        (lambda n, b: (200, b'{"rewards": [NaN, 1.0]}'), "reward 0 of 2 is nan", 1),
        (lambda n, b: (200, b'{"rewards": [1.0, -Infinity]}'), "reward 1 of 2 is -inf", 1),
        (lambda n, b: (200, {"scores": [1.0, 2.0]}), r"the answer is not \{\"rewards\": \[...\]\}: b'\{\"scores\"", 1),
        (lambda n, b: (200, [1.0, 2.0]), "the answer is not", 1),
        (lambda n, b: (200, b"<html>"), "the answer is not JSON: b'<html>'", 1),
        (lambda n, b: (200, b"\xff\xfe"), "the answer is not JSON", 1),
    ],
)
def test_what_a_server_does_wrong_is_told(answer: Answer, message: str, requests: int) -> None:
    with serve(answer) as server:
        reward = HTTPReward(HTTPRewardConfig(server.url, retries=2, backoff=0.01))
        with pytest.raises(RewardServerError, match=message) as caught:
            reward(*texts(2))
        assert server.url in str(caught.value) and len(server.requests) == requests


def test_a_slow_server() -> None:
    release = threading.Event()

    def never(number: int, body: dict) -> tuple[int, object]:
        release.wait(20)
        return lengths(number, body)

    with serve(never) as server:
        reward = HTTPReward(HTTPRewardConfig(server.url, timeout=0.2, retries=1, backoff=0.01))
        with pytest.raises(RewardServerError, match=r"attempt 2 of 2: no answer in 0\.2 s"):
            reward(*texts(2))
        release.set()


def raw_server(speak) -> tuple[str, threading.Thread, socket.socket]:  # type: ignore[no-untyped-def]
    """A server below HTTP: `speak(connection)` after the request came in."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received = b""
                while not received.endswith(b"}"):  # closing with unread bytes would be a reset
                    received += connection.recv(1 << 16)
                try:
                    speak(connection)
                except OSError:
                    continue

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread, listener


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(100):
        connection.sendall(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("speak", "message"),
    [
        (drip, r"no answer in 0\.3 s"),
        (
            lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"),
            "no connection: the answer broke off 999 bytes",
        ),
        (lambda c: c.sendall(b"hello\r\n\r\n"), "no connection: hello"),
        (lambda c: None, "no connection: Remote end closed connection"),
    ],
)
def test_a_server_that_breaks_off_or_drips(speak, message: str) -> None:  # type: ignore[no-untyped-def]
    url, _, listener = raw_server(speak)
    reward = HTTPReward(HTTPRewardConfig(url, timeout=0.3, retries=1, backoff=0.01))
    with pytest.raises(RewardServerError, match=f"attempt 2 of 2: {message}"):
        reward(*texts(1))
    listener.close()


def test_a_server_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/score"
    with pytest.raises(RewardServerError, match=rf"reward server {url}, attempt 3 of 3: no connection: .*refused"):
        HTTPReward(HTTPRewardConfig(url, retries=2, backoff=0.01, wait=0))(*texts(1))


def test_a_server_that_is_not_up_yet_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """However few the attempts: it loads its model. Many requests wait for it, and one line says so."""
    with serve(lengths) as server:
        url = server.url
    waits = HTTPRewardConfig(url, retries=0, backoff=0.01, batch_size=1, wait=30)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(HTTPReward(waits), *texts(4))
        while len(http_client._waiting) < 4:
            time.sleep(0.01)
        with serve(lengths, int(url.split(":")[2].split("/")[0])):
            assert asked.result(30).tolist() == [0, 1, 2, 3]
    told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"waiting for the reward server {url}: no connection: .*refused; 30 s left", told[0])
    assert told[1:] == [f"the reward server {url} answers"] and not any_server_away()
    with pytest.raises(ServerAwayError, match=rf"^reward server {url}: no connection: .*refused, for 0\.2 s"):
        HTTPReward(replace(waits, wait=0.2))(*texts(2))
    while any_server_away():  # the other request's thread has yet to see that it is over
        time.sleep(0.01)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:  # another request has failed, and nobody waits any more
        given_up = pool.submit(Poster("reward server", waits, ServerError).post, url, {}, read_json, stop)
        while not any_server_away():
            time.sleep(0.01)
        stop.set()
        with pytest.raises(ServerError, match="another request failed"):
            given_up.result(30)
    assert not any_server_away()


def test_a_thread_that_cannot_start_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or no call would ever run again: each waits for a place that nobody gives back."""
    workers = Workers(1)
    with monkeypatch.context() as full:
        full.setattr(
            threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        with pytest.raises(RuntimeError, match="can't start new thread"):
            workers.submit(lambda: 1)
    assert workers.submit(lambda: 2).result(10) == 2


def test_one_failure_ends_the_others() -> None:
    def fails(number: int, body: dict) -> tuple[int, object]:
        return (400, b"bad") if body["prompts"] == ["q0"] else (503, b"busy")

    with serve(fails) as server:
        reward = HTTPReward(HTTPRewardConfig(server.url, retries=50, backoff=60, batch_size=1, concurrency=2))
        start = time.monotonic()
        with pytest.raises(RewardServerError, match="status 400"):
            reward(*texts(10))
        assert time.monotonic() - start < 50 and len(server.requests) < 10


def test_the_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serve(lengths) as server:
        assert reward_function(server.url)(*texts(2)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "ftp://x"}, "url = 'ftp://x' must start with http:// or https://"),
        ({"url": "http://x", "timeout": 0}, r"timeout = 0\.0 must be above 0"),
        ({"url": "http://x", "retries": -1}, "retries = -1 must be at least 0"),
        ({"url": "http://x", "batch_size": 0}, "batch_size = 0 must be at least 1"),
        (
            {"url": "http://x", "batchsize": 2},
            "unknown key reward.batchsize = 2 in HTTPRewardConfig; did you mean 'batch_size'",
        ),
        ({"timeout": 2}, "reward needs the key 'url', which is missing"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_function(options)
    with pytest.raises(ValueError, match="2 prompts, 1 completions and 1 answers; their numbers must be equal"):
        HTTPReward(HTTPRewardConfig("http://x"))(["a", "b"], ["a"], ["a"])
