"""A time limit for calls of a user's Python function, by the alarm signal of the process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")

_AGAIN = 1.0  # seconds between alarms of one call: the function may have swallowed the first


class TimeLimitExceeded(BaseException):
    """A call took longer than its limit; no Exception, which the call itself might catch."""


def check_time_limit(seconds: float | None) -> None:
    """Refuse a time limit outside the main thread, the only one that handles signals; ValueError."""
    if seconds is not None and threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"timeout = {seconds:g} of a reward function needs the main thread, because it uses the signal SIGALRM; score "
            "in the main thread, or set timeout to null"
        )


def within(seconds: float | None, call: Callable[[], ResultT]) -> ResultT:
    """Return the result of `call`, or end it after `seconds`; None is no limit.

    Ends Python code and waiting calls (sleep, sockets, locks); compiled code ends when it returns to Python. Main thread only.
     TimeLimitExceeded: the call took longer, even if it returned a value then.
    """
    if seconds is None:
        return call()
    rang, over = False, False

    def ring(number: int, frame: object) -> None:
        nonlocal rang
        if not over:
            rang = True
            raise TimeLimitExceeded

    handler = signal.signal(signal.SIGALRM, ring)
    timer = 0.0, 0.0
    try:
        timer = signal.setitimer(signal.ITIMER_REAL, seconds, max(seconds, _AGAIN))
        result = call()
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
    if rang:
        raise TimeLimitExceeded
    return result
