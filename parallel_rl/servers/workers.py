"""Calls on threads, bounded in number, with the first failure of many."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

ResultT = TypeVar("ResultT")


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
