"""JSON posted to servers: a deadline for each attempt, retries of what fails in passing, a bound on what runs at once."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from parallel_rl.agreement import Unavailable
from parallel_rl.config.json_text import parse_json
from parallel_rl.config.shown import Secret, printable
from parallel_rl.config.strict import at_least
from parallel_rl.experience.http_exchange import Answer, NoAnswerError, SlowError, exchange

ResultT = TypeVar("ResultT")

_AWAY = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)  # not started yet, or ended
_LOOK, _TELL = 5.0, 60.0  # seconds between looks at a server that is away, and between lines on it
_PASSING = (408, 425, 429)  # the server asks to come again; so does every 5xx
_SHOWN, _LONGEST = 400, 4000  # characters of a refusal, and of any message


class ServerError(RuntimeError):
    """A server did not give what it was asked for: the message names its URL, the attempt and what came back.

    `status` is that of the last answer; None: there was none, or what it held was refused. `lost`: the connection was.
    """

    status: int | None = None
    lost: bool = False


class ServerAwayError(ServerError, Unavailable):
    """A server refused connections for as long as one waits for it."""


class PassingError(Exception):
    """An answer that another attempt may better; raised by what reads answers."""


class _FailedAttempt(Exception):
    """One attempt gave no result.

    `final`: no other one would. `away`: the server refuses connections, and is waited for.
    """

    def __init__(
        self, what: str, status: int | None = None, lost: bool = False, away: bool = False, final: bool = False
    ) -> None:
        super().__init__(what)
        self.status, self.lost, self.away, self.final = status, lost, away, final


@dataclass(frozen=True, kw_only=True)
class PostingConfig:
    """Timeout, retries and concurrency of requests to a server.

    Attributes:
        timeout: seconds for one attempt, from the look-up of the name to the last byte, however few come at a time.
        retries: attempts after a first that failed in passing: connection lost, too slow, status 408, 425, 429 or 5xx.
        backoff: seconds before the first of them; doubled for each that follows.
        wait: seconds for a server that refuses connections, as one does that is started (again) and loads its model; no
            attempt is counted meanwhile. 0: it counts as one.
        batch_size: samples in a request.
        concurrency: requests at a time.
        answer_megabytes: an answer that is longer is refused.
    """

    timeout: float = 60.0
    retries: int = 3
    backoff: float = 1.0
    wait: float = 1200.0
    batch_size: int = 64
    concurrency: int = 8
    answer_megabytes: int = 64

    def __post_init__(self) -> None:
        at_least(self, retries=0, backoff=0, wait=0, batch_size=1, concurrency=1, answer_megabytes=1)
        if not 0 < self.timeout <= 1e6:
            raise ValueError(f"timeout = {self.timeout} must be above 0 and at most a million seconds")


@dataclass(frozen=True)
class Poster:
    """Posts JSON until an answer is right or the attempts are spent.

    Attributes:
        name: of the server in messages, such as "reward server".
        config: see `PostingConfig`.
        error: what is raised.
        key: sent as a bearer token; it is in no message.
        headers: sent beside it.
    """

    name: str
    config: PostingConfig
    error: type[ServerError]
    key: Secret | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def post(
        self,
        url: str | Callable[[int], str],
        body: object,
        read: Callable[[bytes], ResultT],
        stop: threading.Event,
    ) -> ResultT:
        """Post `body` and return `read(answer)`, after retries where they can help.

        Args:
            url: the address, or the one for an attempt (from 1).
            body: what becomes JSON; None asks by GET.
            read: raises ValueError for an answer that no other attempt would better, `PassingError` for one that it may.
            stop: no further attempt is made once it is set.

        Raises:
            ServerError: of the class `error`: the last attempt failed, or an answer was refused.
            ServerAwayError: it refused connections for `wait` seconds.
        """
        attempts, raw = self.config.retries + 1, None if body is None else json.dumps(body).encode()
        attempt, away_since = 1, None
        try:
            while True:
                address = url if isinstance(url, str) else url(attempt)
                where = f"{address}, attempt {attempt} of {attempts}"
                if stop.is_set():
                    raise self.failure(where, "not asked, for another request has failed")
                try:
                    return self._attempt(address, raw, read)
                except _FailedAttempt as failed:
                    if failed.away:
                        away_since = away_since or time.monotonic()
                        self._await(f"{self.name} {address}", str(failed), away_since + self.config.wait, stop)
                        continue
                    away_since = None
                    _waiting.ends()
                    if failed.final or attempt == attempts or stop.wait(self._pause(attempt)):
                        raise self.failure(where, str(failed), failed.status, failed.lost) from None
                    attempt += 1
        finally:
            _waiting.ends()

    def _attempt(self, address: str, raw: bytes | None, read: Callable[[bytes], ResultT]) -> ResultT:
        """One attempt's result.

        Raises:
            _FailedAttempt: there is none.
        """
        try:
            answer = self._once(address, raw)
            _waiting.ends(f"{self.name} {address}")
            if 200 <= answer.status < 300:
                return self._read(answer.body, read)
        except SlowError:
            raise _FailedAttempt(f"no answer in {self.config.timeout:g} s") from None
        except NoAnswerError as error:
            away = self.config.wait > 0 and error.errno in _AWAY
            raise _FailedAttempt(f"no connection: {error}", lost=True, away=away) from None
        except PassingError as error:
            raise _FailedAttempt(str(error)) from None
        except ValueError as error:
            raise _FailedAttempt(str(error), final=True) from None
        final = answer.status < 500 and answer.status not in _PASSING
        raise _FailedAttempt(f"status {answer.status} {self._start(answer)}", answer.status, final=final)

    def _pause(self, attempt: int) -> float:
        """Seconds after an attempt (from 1)."""
        return self.config.backoff * 2 ** min(attempt - 1, 20)

    def _await(self, server: str, what: str, end: float, stop: threading.Event) -> None:
        """Wait a little for a server that is away.

        Raises:
            ServerAwayError: its time is up.
        """
        left = end - time.monotonic()
        if left <= 0:
            raise ServerAwayError(f"{server}: {what}, for {self.config.wait:g} s (`wait`)")
        _waiting.goes_on(server, what, left)
        stop.wait(min(left, _LOOK, max(self.config.backoff, 0.01)))

    def failure(self, where: str, what: str, status: int | None = None, lost: bool = False) -> ServerError:
        """The error to raise: what the server said stands in it without the key, which some repeat, and control characters."""
        said = " ".join(printable(what).split())
        error = self.error(f"{self.name} {where}: {(said if self.key is None else self.key.hide(said))[:_LONGEST]}")
        error.status, error.lost = status, lost
        return error

    def _once(self, url: str, body: bytes | None) -> Answer:
        key = {} if self.key is None else {"Authorization": f"Bearer {self.key.reveal()}"}
        headers = {"Content-Type": "application/json", **self.headers, **key}
        return exchange(url, body, headers, self.config.timeout, self.config.answer_megabytes * 1_000_000)

    def _read(self, answer: bytes, read: Callable[[bytes], ResultT]) -> ResultT:
        try:
            return read(answer)
        except (PassingError, ValueError):
            if self.key is None:
                raise
        read(self.key.cover(answer))  # the same fault, told of an answer that does not have the key
        raise ValueError("the answer holds the key that was sent")

    def _start(self, refusal: Answer) -> str:
        body = refusal.body if self.key is None else self.key.cover(refusal.body)
        reason = refusal.reason if self.key is None else self.key.hide(refusal.reason)
        return f"{reason[:_SHOWN]}: {body.decode(errors='replace')[:_SHOWN]}"


class _Waiting:
    """The threads that wait for a server, each server with a line on it a minute, however many requests wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._told: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._threads)

    def goes_on(self, server: str, what: str, left: float) -> None:
        now = time.monotonic()
        with self._lock:
            self._threads.add(threading.get_ident())
            if now - self._told.get(server, -_TELL) < _TELL:
                return
            self._told[server] = now
        print(f"waiting for the {server}: {what}; {left:.0f} s left", flush=True)

    def ends(self, answering: str | None = None) -> None:
        """This thread waits no longer; the server that answers it, if one does, is told where the waiting was."""
        with self._lock:
            self._threads.discard(threading.get_ident())
            told = answering is not None and self._told.pop(answering, None) is not None
        if told:
            print(f"the {answering} answers", flush=True)


_waiting = _Waiting()


def any_server_away() -> bool:
    """Whether this process waits for a server that refuses connections.

    >>> any_server_away()
    False
    """
    return bool(_waiting)


def read_json(answer: bytes) -> object:
    """The JSON of an answer.

    Raises:
        ValueError: no JSON, or none that is taken, see `parse_json`; the message has its start.
    """
    try:
        return parse_json(answer)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"the answer is not JSON: {answer[:200]!r}") from None
    except ValueError as error:
        raise ValueError(f"the answer is refused: {error}: {answer[:200]!r}") from None
