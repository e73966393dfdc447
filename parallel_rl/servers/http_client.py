"""POST JSON to servers: threads bounded in number, a deadline per attempt, retries of temporary failures."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import TypeVar

from parallel_rl.agreement import Unavailable
from parallel_rl.config.json_text import parse_json
from parallel_rl.config.shown import Secret, printable
from parallel_rl.config.strict import at_least
from parallel_rl.servers.http_exchange import Answer, NoAnswerError, SlowError, exchange

ResultT = TypeVar("ResultT")

_AWAY = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)  # not started yet, or ended
_LOOK, _TELL = 5.0, 60.0  # seconds between attempts at an absent server, and between lines about it
_PASSING = (408, 425, 429)  # the server wants a retry, as with every 5xx
_SHOWN, _LONGEST = 400, 4000  # characters of a refusal, and of any message


class ServerError(RuntimeError):
    """A server failed; the message names its URL, the attempt and the answer.

    `status`: of the last answer, None without one or for refused content. `lost`: the connection broke.
    """

    status: int | None = None
    lost: bool = False


class ServerAwayError(ServerError, Unavailable):
    """A server refused connections for the whole waiting time."""


class PassingError(Exception):
    """An answer that another attempt may improve; raised by readers of answers."""


class _FailedAttempt(Exception):
    """One attempt gave no result; `final`: retries cannot help, `away`: the server refuses connections."""

    def __init__(
        self, what: str, status: int | None = None, lost: bool = False, away: bool = False, final: bool = False
    ) -> None:
        super().__init__(what)
        self.status, self.lost, self.away, self.final = status, lost, away, final


@dataclass(frozen=True, kw_only=True)
class PostingConfig:
    """Timeout, retries and concurrency of requests to a server.

    Attributes:
        timeout: seconds for one attempt, from name look-up to the last byte.
        retries: attempts after a first temporary failure: connection lost, too slow, status 408, 425, 429 or 5xx.
        backoff: seconds before the first retry, doubled for each later one.
        wait: seconds for a server that refuses connections, e.g. while it loads its model; not counted as attempts. 0:
            counted as one.
        batch_size: samples in a request.
        concurrency: requests at a time.
        answer_megabytes: longer answers are refused.
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
        error: the class to raise.
        key: sent as a bearer token; in no message.
        headers: sent in addition.
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
        """Post `body` and return `read(answer)`, after retries if they can help.

        Args:
            url: the address, or the one for an attempt (from 1).
            body: sent as JSON; None sends a GET.
            read: raises ValueError for an answer that no retry would improve, else `PassingError`.
            stop: once set, no further attempt starts.

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
                    raise self.failure(where, "not sent, because another request failed")
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
        return self.config.backoff * 2 ** min(attempt - 1, 20)

    def _await(self, server: str, what: str, end: float, stop: threading.Event) -> None:
        """Wait a little for an absent server; ServerAwayError if its time is up."""
        seconds = end - time.monotonic()
        if seconds <= 0:
            raise ServerAwayError(f"{server}: {what}, for {self.config.wait:g} s (`wait`)")
        _waiting.goes_on(server, what, seconds)
        stop.wait(min(seconds, _LOOK, max(self.config.backoff, 0.01)))

    def failure(self, where: str, what: str, status: int | None = None, lost: bool = False) -> ServerError:
        """Make the error to raise, without the key, which servers may repeat, and control characters."""
        text = " ".join(printable(what).split())
        error = self.error(f"{self.name} {where}: {(text if self.key is None else self.key.hide(text))[:_LONGEST]}")
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
        read(self.key.cover(answer))  # the same fault, for an answer without the key
        raise ValueError("the answer holds the key that was sent")

    def _start(self, refusal: Answer) -> str:
        body = refusal.body if self.key is None else self.key.cover(refusal.body)
        reason = refusal.reason if self.key is None else self.key.hide(refusal.reason)
        return f"{reason[:_SHOWN]}: {body.decode(errors='replace')[:_SHOWN]}"


class _Waiting:
    """Threads waiting for a server; each server gets one line a minute, for any number of requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._told: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._threads)

    def goes_on(self, server: str, what: str, seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            self._threads.add(threading.get_ident())
            if now - self._told.get(server, -_TELL) < _TELL:
                return
            self._told[server] = now
        print(f"waiting for the {server}: {what}; {seconds:.0f} s left", flush=True)

    def ends(self, answering: str | None = None) -> None:
        with self._lock:
            self._threads.discard(threading.get_ident())
            printed = answering is not None and self._told.pop(answering, None) is not None
        if printed:
            print(f"the {answering} answers", flush=True)


_waiting = _Waiting()


def any_server_away() -> bool:
    """Return whether this process waits for a server that refuses connections."""
    return bool(_waiting)


def read_json(answer: bytes) -> object:
    """Parse an answer's JSON; the ValueError of a bad or refused one has its start."""
    try:
        return parse_json(answer)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"the answer is not JSON: {answer[:200]!r}") from None
    except ValueError as error:
        raise ValueError(f"the answer is refused: {error}: {answer[:200]!r}") from None


class Workers:
    """Runs calls on at most `limit` threads, in order; the program's exit does not wait for them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._queue: deque[tuple[Future, Callable[[], object]]] = deque()
        self._running = 0

    def submit(self, call: Callable[[], ResultT]) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        with self._lock:
            self._queue.append((future, call))
            start = self._running < self.limit
            self._running += start
        if start:
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:  # no more threads: the running ones suffice
                with self._lock:
                    self._running -= 1
                    if not self._running:
                        self._queue.clear()
                        raise
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._running -= 1
                    return
                future, call = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


def gather(futures: Sequence[Future[ResultT]], stop: threading.Event) -> list[ResultT]:
    """Return all results in order; on the first failure set `stop`, cancel pending calls and re-raise."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = next((future for future in futures if future in done and future.exception() is not None), None)
    if failed is None:
        return [future.result() for future in futures]
    stop.set()  # the others end at their next attempt
    for future in futures:
        future.cancel()
    raise failed.exception()  # type: ignore[misc]
