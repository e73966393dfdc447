"""Built-in checkers of texts: exact_match, math, format."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import threading
from pathlib import Path

_SECONDS = 10.0  # for one answer; the first one, which imports sympy, has a minute
_FORMAT = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)


def answer_text(answer: object) -> str:
    """Return an answer as text, other values as JSON.

    >>> answer_text("4"), answer_text(4), answer_text([1, "a"])
    ('4', '4', '[1, "a"]')
    """
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def exact_match(prompt: str, completion: str, answer: object) -> float:
    """Return 1 if the completion equals the answer (see `answer_text`) to the character, else 0."""
    return float(completion == answer_text(answer))


def think_format(prompt: str, completion: str, answer: str) -> float:
    """Return 1 for one thought in <think> … </think> and then an answer, both not empty; else 0.

    >>> think_format("", "<think>7 is odd</think>7", ""), think_format("", "7", "")
    (1.0, 0.0)
    """
    match = _FORMAT.fullmatch(completion)
    if match is None or not match["thought"].strip() or not match["answer"].strip():
        return 0.0
    return float(not re.search("</?think>", match["thought"] + match["answer"]))


def math_equal(prompt: str, completion: str, answer: object) -> float:
    """Return 1 if the completion's last result equals the answer as mathematics, by math-verify; else 0.

    1/2 is 0.5, and \\sqrt{8} is 2\\sqrt{2}. Of the answer only what follows "####" counts, as in GSM8K. A separate process
    decides; the reward is 0 after ten seconds (a tower of powers).

    Raises:
        ValueError: math-verify is not installed.
    """
    check_math()
    return float(_worker.ask(completion, answer_text(answer)))


def check_math() -> None:
    """Raise ValueError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("reward = 'math' needs math-verify, which is not installed: pip install math-verify")


class _Worker:
    """The process of math_worker.py, started on demand and restarted after a kill."""

    _process: subprocess.Popen[str] | None
    _lock: threading.Lock  # of scoring threads: answers must match their questions

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the process after a fork: the parent reads its answers."""
        self._process, self._lock = None, threading.Lock()

    def ask(self, completion: str, answer: str) -> bool:
        with self._lock:
            return self._ask(completion, answer)

    def _ask(self, completion: str, answer: str) -> bool:
        seconds = _SECONDS
        if self._process is None:
            script = str(Path(__file__).with_name("math_worker.py"))
            self._process = subprocess.Popen(  # nosec B603 # fixed words
                [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
            seconds = 60.0
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([completion, answer]) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], seconds)
            verdict = process.stdout.readline().strip() if ready else ""
        except OSError:
            verdict = ""
        except BaseException:  # interrupted: the next question must not get this answer
            self.close()
            raise
        if verdict not in ("0", "1"):  # too slow, or out of memory
            self.close()
        return verdict == "1"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_worker = _Worker()
atexit.register(_worker.close)
os.register_at_fork(after_in_child=_worker.forget)
