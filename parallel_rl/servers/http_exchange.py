"""One request and its answer, within limits of seconds and bytes, for any server."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, IncompleteRead, ProtocolError
from urllib3.util.connection import create_connection

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from urllib3.response import HTTPResponse

_HEAD = 1 << 20  # bytes besides an answer's body: its head, and those of "100 Continue"
_REFUSAL = 1 << 20  # bytes read of an unsuccessful answer


@dataclass(frozen=True)
class Answer:
    status: int
    reason: str
    body: bytes


class SlowError(Exception):
    """The time is over."""


class NoAnswerError(Exception):
    """No connection, or it broke off; `errno` is the system's reason, if it gave one."""

    errno: int | None = None


def exchange(url: str, body: bytes | None, headers: Mapping[str, str], seconds: float, most: int) -> Answer:
    """Post `body` to `url`, or get `url` if it is None; no proxy, redirection or retry.

    `seconds` cover name look-up to the last byte; `most` bounds the bytes of an answer's body.

    Raises:
        SlowError: no whole answer in `seconds`.
        NoAnswerError: no connection, no HTTP, or a broken-off answer.
        ValueError: an answer that is too long or compressed; a certificate that this machine does not trust.
    """
    parts = urlsplit(url)
    host, path = parts.hostname or "", (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    meter = _Meter(seconds, most + _HEAD)
    try:
        if parts.scheme == "https":
            connection: _Plain = _Secure(host, parts.port or 443, ssl_context=_trusted())
        else:
            connection = _Plain(host, parts.port or 80)
        connection.meter = meter
        with contextlib.closing(connection):
            sent = {"Accept-Encoding": "identity", "Connection": "close", **headers}
            with contextlib.suppress(BrokenPipeError):  # it may have answered before it had all of it
                method = "GET" if body is None else "POST"
                connection.request(method, path, body, sent, preload_content=False, decode_content=False)
            response = connection.getresponse()
            with contextlib.closing(response):
                return _read(response, most)
    except ssl.SSLCertVerificationError as error:
        why = f"the server's certificate is not trusted: {error.verify_message}"
        raise ValueError(f"{why}; set SSL_CERT_FILE to a file that holds its certificate authority") from None
    except (HTTPError, http.client.HTTPException, OSError) as error:
        raise meter.failure(most) or _no_answer(error) from None


def _read(response: HTTPResponse, most: int) -> Answer:
    well = 200 <= response.status < 300
    coded = response.headers.get("Content-Encoding", "identity").strip().lower()
    if well and coded != "identity":
        raise ValueError(
            f"the answer is compressed ({coded[:20]}), but the request accepts no compression; turn it off at the server or "
            "proxy"
        )
    limit, parts, size = most if well else _REFUSAL, [], 0
    with contextlib.nullcontext() if well else contextlib.suppress(HTTPError, OSError):
        while size <= limit and (part := response.read1(1 << 16, decode_content=False)):
            parts.append(part)
            size += len(part)
    if well and size > most:
        raise ValueError(_too_long(most))
    return Answer(response.status, response.reason or "", b"".join(parts) if coded == "identity" else b"")


def _no_answer(error: Exception) -> NoAnswerError:
    """Return the error that ended a connection; urllib3 wraps its cause."""
    cause = error.args[-1] if isinstance(error, ProtocolError) else error
    failure = NoAnswerError(_reason(cause))
    failure.errno = getattr(cause, "errno", None)
    return failure


def _reason(cause: Exception) -> str:
    if isinstance(cause, (IncompleteRead, http.client.IncompleteRead)):
        missing = "" if cause.expected is None else f"{cause.expected} bytes "
        return f"the answer broke off {missing}before its end"
    return str(cause) or type(cause).__name__


def _too_long(most: int) -> str:
    return f"the answer is longer than {most / 1e6:,.3g} MB; answer_megabytes allows more"


class _Meter:
    def __init__(self, seconds: float, most: int) -> None:
        self._end, self._bytes = time.monotonic() + seconds, most

    def seconds(self) -> float:
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds

    def count(self, size: int) -> None:
        self._bytes -= size
        if self._bytes < 0:
            raise ConnectionError

    def failure(self, most: int) -> Exception | None:
        if self._bytes < 0:
            return ValueError(_too_long(most))
        return SlowError() if time.monotonic() >= self._end else None


class _Bounded:
    """A connected socket, plain or TLS, with every call limited to the remaining seconds."""

    def __init__(self, inner: socket.socket, meter: _Meter) -> None:
        self._inner, self._meter = inner, meter

    def sendall(self, data: bytes) -> None:
        unsent = memoryview(data)
        while unsent:
            self._inner.settimeout(self._meter.seconds())
            unsent = unsent[self._inner.send(unsent) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Reader(self._inner, self._meter))

    def settimeout(self, seconds: float | None) -> None:
        """Do nothing: the meter sets timeouts."""

    def close(self) -> None:
        self._inner.close()


class _Reader(io.RawIOBase):
    """Reader of a socket with every read metered, of status line, header or body."""

    def __init__(self, inner: socket.socket, meter: _Meter) -> None:
        self._inner, self._meter = inner, meter
        self._raw = inner.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._inner.settimeout(self._meter.seconds())
        size = self._raw.readinto(buffer) or 0
        self._meter.count(size)
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Plain(HTTPConnection):
    meter: _Meter

    def _new_conn(self) -> socket.socket:
        return _connected(self, self.meter)

    def connect(self) -> None:
        super().connect()
        self.sock = _Bounded(self.sock, self.meter)


class _Secure(_Plain, HTTPSConnection):
    """A `_Plain` connection through TLS."""


def _connected(connection: HTTPConnection, meter: _Meter) -> socket.socket:
    failure: OSError = OSError("the host has no address")
    for *_, address in _looked_up(connection.host, connection.port, meter):
        try:
            sock = create_connection(address[:2], meter.seconds(), socket_options=connection.socket_options)
        except OSError as error:
            failure = error
        else:
            sock.settimeout(meter.seconds())  # includes the TLS handshake
            return sock
    raise failure


def _looked_up(host: str, port: int, meter: _Meter) -> list[tuple]:
    """Look up the host's addresses, in a thread: the system's resolver has its own timeouts."""
    addresses: Future[list[tuple]] = Future()

    def look_up() -> None:
        try:
            addresses.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except BaseException as error:
            addresses.set_exception(error)

    threading.Thread(target=look_up, daemon=True).start()
    wait([addresses], meter.seconds())
    meter.seconds()  # or TimeoutError
    return addresses.result()


@cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()
