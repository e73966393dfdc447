"""Checkers that come with the library: exact_match, math, format. They know texts only."""

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

_SECONDS = 10.0  # for one answer; the first one has a minute, in which sympy is imported
_FORMAT = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)


def answer_text(answer: object) -> str:
    """The text of an answer: itself, or another value as JSON.

    >>> answer_text("4"), answer_text(4), answer_text([1, "a"])
    ('4', '4', '[1, "a"]')
    """
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def exact_match(prompt: str, completion: str, answer: object) -> float:
    """1 where the completion is the answer (see `answer_text`), to the character; else 0."""
    return float(completion == answer_text(answer))


def think_format(prompt: str, completion: str, answer: str) -> float:
    """1 where the completion is one thought in <think> … </think> and then an answer, neither of them empty; else 0.

    >>> think_format("", "<think>7 is odd</think>7", ""), think_format("", "7", "")
    (1.0, 0.0)
    """
    match = _FORMAT.fullmatch(completion)
    if match is None or not match["thought"].strip() or not match["answer"].strip():
        return 0.0
    return float(not re.search("</?think>", match["thought"] + match["answer"]))


def math_equal(prompt: str, completion: str, answer: object) -> float:
    """1 where the last result in the completion equals the answer as mathematics, by math-verify; else 0.

    1/2 is 0.5, and \\sqrt{8} is 2\\sqrt{2}. Of the answer counts what follows "####", as in GSM8K. It is worked out in a
    process of its own, within ten seconds, or the reward is 0 (a tower of powers).

    Raises:
        ValueError: math-verify is not installed.
    """
    check_math()
    return float(_worker.ask(completion, answer_text(answer)))


def check_math() -> None:
    """Refuse where math-verify is not installed.

    Raises:
        ValueError: it is not.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("reward = 'math' asks math-verify, which is not installed: pip install math-verify")


class _Worker:
    """The process of math_worker.py, started when it is first asked, and again after it had to be ended."""

    _process: subprocess.Popen[str] | None
    _lock: threading.Lock  # of threads that score: an answer is that of the question before it

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have no process yet, as after a fork: the parent reads the answers of the one that there is."""
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
        if verdict not in ("0", "1"):  # too long, or out of memory
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
