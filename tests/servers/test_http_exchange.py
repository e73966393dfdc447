"""Servers that mean ill: whatever they send, and however slowly, a request ends in time, in bounded memory, without a leak."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel_rl.config.shown import Secret, check_address
from parallel_rl.experience import HTTPReward, HTTPRewardConfig, RewardServerError
from parallel_rl.servers import http_exchange
from parallel_rl.servers.completions import Expected, read_native, read_openai
from tests.servers.server import serve

KEY = "sk-Qw7/er'ty\"9_zXcV"
Speak = Callable[[socket.socket], None]


@contextmanager
def below_http(speak: Speak) -> Iterator[str]:
    """The address of a server that says what a test likes, once it has a request, until the client goes."""
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def run() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    received = b""
                    while not received.endswith(b"}"):
                        received += connection.recv(1 << 16) or b"}"
                    speak(connection)
                except OSError:
                    continue

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.close()


def endless(start: bytes, more: bytes, pause: float = 0.0) -> Speak:
    def speak(connection: socket.socket) -> None:
        connection.sendall(start)
        for _ in range(10_000_000):  # the client hangs up
            connection.sendall(more)
            time.sleep(pause)

    return speak


def once(answer: bytes) -> Speak:
    return lambda connection: connection.sendall(answer)


def silent(connection: socket.socket) -> None:
    connection.recv(1)  # until the client goes


def score(url: str, **options: object) -> str:
    """How the one attempt fails."""
    config = HTTPRewardConfig(**{"url": url, "timeout": 0.3, "retries": 0, "answer_megabytes": 1, **options})  # type: ignore[arg-type]
    with pytest.raises(RewardServerError) as caught:
        HTTPReward(config)(["q"], ["c"], ["a"])
    return str(caught.value)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("speak", "message"),
    [
        (silent, "no answer in 0.3 s"),
        (endless(b"H", b"", 0.05), "no answer in 0.3 s"),
        (endless(OK, b"X", 0.05), "no answer in 0.3 s"),  # a head, byte by byte: each is within the timeout of a read
        (endless(OK + b"Content-Length: 1000\r\n\r\n", b" ", 0.05), "no answer in 0.3 s"),
        (endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 0.05), "no answer in 0.3 s"),
        (endless(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n", 0.02), "no answer in 0.3 s"),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02), "no answer in 0.3 s"),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 4000), "longer than 1 MB"),
        (endless(OK, b"X: " + b"y" * 1000 + b"\r\n"), "no connection: got more than 100 headers"),
        (endless(OK + b"\r\n", b" " * 65536), "the answer is longer than 1 MB; answer_megabytes allows more"),
        (endless(OK + b"Content-Length: 99999999999\r\n\r\n", b" " * 65536), "the answer is longer than 1 MB"),
        (endless(OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", b" " * 65536), "longer than 1 MB"),
        (
            once(OK + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n" + gzip.compress(bytes(1 << 24))),
            "the answer is compressed (gzip), but the request accepts no compression",
        ),
        (once(OK + b"Content-Length: 9\r\n\r\n{"), "no connection: the answer broke off 8 bytes before its end"),
        (once(b"HTTP/1.1 403 No\x1b]0;owned\x07\r\nContent-Length: 4\r\n\r\n\x1b[2J"), r"403 No\x1b]0;owned\x07: \x1b[2J"),
        (once(b"\x1b[2J\r\n\r\n"), r"no connection: \x1b[2J"),
    ],
)  # fmt: skip
def test_an_evil_server_costs_one_timeout_and_bounded_memory(speak: Speak, message: str) -> None:
    start = time.monotonic()
    with below_http(speak) as host:
        found = score(f"http://{host}/", timeout=0.3 if "no answer" in message else 60)
    assert message in found and found.isprintable(), found
    assert time.monotonic() - start < 20  # of a machine with much else to do; else it would never end


def test_a_handshake_and_an_upload_that_do_not_end() -> None:
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel connects, and nobody ever reads
        port = listener.getsockname()[1]
        assert "no answer in 0.3 s" in score(f"https://127.0.0.1:{port}/")
        config = HTTPRewardConfig(f"http://127.0.0.1:{port}/", timeout=0.3, retries=0)
        with pytest.raises(RewardServerError, match=r"no answer in 0\.3 s"):
            HTTPReward(config)(["q" * (1 << 24)], ["c"], ["a"])
    assert time.monotonic() - start < 20


def test_a_name_that_is_looked_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver's own patience is no part of `timeout`; a name that is not there is told as the resolver tells it."""
    assert "no connection: [Errno" in score("http://no-such-host.invalid/", timeout=60.0)
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(600) and [])
    start = time.monotonic()
    assert "no answer in 0.3 s" in score("http://localhost/")
    assert time.monotonic() - start < 20
    over.set()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_certificate_is_trusted_or_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later attempt would trust it; and TLS serves where the certificate is known."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*made.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serve(lambda number, body: (200, {"rewards": [0.5]}), tls=context) as server:
        assert server.url.startswith("https://")
        found = score(server.url, timeout=60.0, retries=3, backoff=1e6)
        assert (
            "attempt 1 of 4: the server's certificate is not trusted: self-signed certificate; set SSL_CERT_FILE"
            in found
        )
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        http_exchange._trusted.cache_clear()
        assert HTTPReward(HTTPRewardConfig(server.url))(["q"], ["c"], ["a"]).tolist() == [0.5]
        http_exchange._trusted.cache_clear()


@pytest.mark.parametrize("before", [0, 150, 190, 380, 395, 100_000])  # cuts are at 200 bytes and 400 characters
@pytest.mark.parametrize("status", [401, 200])
@pytest.mark.parametrize("form", ["plain", "json", "part", "repeated"])
def test_no_part_of_a_key_is_told(monkeypatch: pytest.MonkeyPatch, before: int, status: int, form: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    said = {"plain": KEY, "json": json.dumps(KEY), "part": KEY[:15], "repeated": KEY * 200}[form]
    with serve(lambda number, body: (status, b"x" * before + said.encode())) as server:
        found = score(server.url, api_key_env="JUDGE_KEY", timeout=60)
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    shown = max(size for size in range(len(KEY) + 1) if any(KEY[at : at + size] in found for at in range(len(KEY))))
    assert shown < 4 or (form == "part" and shown < 8), found


def test_a_key_in_a_reason_or_in_no_http_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    for answer in (f"HTTP/1.1 401 {KEY}\r\n\r\n", f"{KEY}\r\n\r\n"):
        with below_http(once(answer.encode())) as host:
            assert KEY[:8] not in score(f"http://{host}/", api_key_env="JUDGE_KEY", timeout=60)


@pytest.mark.parametrize(
    "value", ["sk-1234\r\nX-Evil: 1", "sk-1234 5678", "sk-12345\n", "sk-1234\x1b[2J", "schlüssel", ""]
)
def test_a_key_that_no_header_can_have_is_refused_unseen(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(ValueError, match="api_key_env = 'JUDGE_KEY'") as caught:
        HTTPRewardConfig("http://judge", api_key_env="JUDGE_KEY")
    assert "1234" not in str(caught.value) and "schl" not in str(caught.value)


def test_a_secret_shows_nowhere() -> None:
    key = Secret(KEY)
    assert {str(key), repr(key), f"{key}", f"{[key]}", "%s" % key} == {"***", "[***]"}  # noqa: UP031
    with pytest.raises(TypeError, match="not written"):
        pickle.dumps(key)
    assert Secret("abc").hide("abcabc ab") == "*** ab"


@pytest.mark.parametrize(
    "url",
    ["http://me:hunter2@judge/x", "http://hunter2@judge", "http://judge/x?key=hunter2", "http://judge/#hunter2",
     "ftp://me:hunter2@judge/", "http://me:hunter2@[::1", "http://me:hunter2@judge:port/", "http://judge/\r\nhunter2?",
     "http://hunter2@"],
)  # fmt: skip
def test_an_address_with_a_secret_is_refused_unseen(url: str) -> None:
    with pytest.raises(ValueError, match="url") as caught:
        check_address(url)
    assert "?key" not in str(caught.value) and "@" not in str(caught.value) and str(caught.value).isprintable()
    assert "hunter2" not in str(caught.value) or "\r" in url


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Authorization": "Bearer hunter2"}, "'Authorization' is not valid; it holds a key"),
        ({"host": "x"}, "'host' is not valid; it is set automatically"),
        ({"X\r\nY": "x"}, "a name of a header is needed"),
        ({"X": "hunter2\r\nY: z"}, "the value of 'X' holds a character"),
    ],
)
def test_headers_that_are_refused(headers: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        HTTPRewardConfig("http://judge", headers=headers)
    assert "hunter2" not in str(caught.value)


def test_headers_are_sent() -> None:
    with serve(lambda number, body: (200, {"rewards": [1]})) as server:
        HTTPReward(HTTPRewardConfig(server.url, headers={"X-Team": "blue"}))(["q"], ["c"], ["a"])
        assert server.headers[0]["X-Team"] == "blue"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (json.dumps({"rewards": [10**400]}), "reward 0 of 1 is 1000"),
        ('{"rewards": [1e39]}', r"reward 0 of 1 is 1e\+39; a finite number is needed \(in float32\)"),
        ("[" * 200_000, "brackets are nested deeper"),
        ('{"rewards": ' + "[" * 200_000, "brackets are nested deeper"),
        ('{"rewards": [1], "rewards": [2]}', "duplicate key 'rewards'"),
        ('{"rewards": [' + "9" * 5000 + "]}", "an integer has more digits than Python reads"),
    ],
)  # fmt: skip
def test_numbers_and_nesting_that_no_reward_has(answer: str, message: str) -> None:
    with serve(lambda number, body: (200, answer.encode())) as server:
        found = score(server.url, timeout=60)
        assert server.url in found
    with pytest.raises(RewardServerError, match=message):
        raise RewardServerError(found)


def openai(changes: dict, choice: dict) -> bytes:
    good = {"index": 0, "finish_reason": "stop", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5, -0.5]}}
    return json.dumps({"choices": [{**good, **choice}], **changes}).encode()


@pytest.mark.parametrize(
    ("changes", "choice", "message"),
    [
        ({"metadata": {"weight_version": "9" * 5000}}, {}, "weight_version is '999"),
        ({"metadata": {"weight_version": str(2**63)}}, {}, "weight_version is '9223372036854775808'"),
        ({"metadata": {"weight_version": True}}, {}, "weight_version is True"),
        ({"metadata": {"weight_version": " 1_0"}}, {}, "weight_version is ' 1_0'"),
        ({}, {"index": [0]}, r"the choices have the indices \[\[0\]\]"),
        ({}, {"token_ids": [1, 10**400]}, "sample 7 .*: token 1 is 1000.*, outside the vocabulary"),
        ({}, {"token_ids": [1, 2**63]}, "sample 7 .*: token 1 is 9223372036854775808, outside"),
    ],
)
def test_numbers_that_no_completion_has(changes: dict, choice: dict, message: str) -> None:
    expected = Expected((7,), 4, 8, (2,))
    read_openai(openai({}, {}), expected)
    huge = openai({}, {"logprobs": {"token_logprobs": [-0.5, -(10**400)]}})
    assert "sample 7 (choice 0 of 1): the log-prob of token 1 is -1000" in str(read_openai(huge, expected)[0].fault)
    with pytest.raises(ValueError, match=message) as caught:
        read_openai(openai(changes, choice), expected)
    assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match=r"duplicate key .*: .* \(sample 7\)"):
        read_native(b'[{"meta_info": {}, "meta_info": {}}]', expected)
