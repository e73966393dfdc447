"""The checkers that come with the library."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from parallel_rl.experience import checkers, reward_function
from parallel_rl.experience.checkers import math_equal, think_format
from parallel_rl.experience.failures import TimeLimitExceeded, within
from parallel_rl.servers.http_client import Workers
from tests.servers.server import serve


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think>b", 1),
        ("\n<think>\na\nb</think>\n\n\\boxed{7}\n", 1),
        ("a</think>b", 0),
        ("<think>a</think>", 0),
        ("<think> </think>b", 0),
        ("so <think>a</think>b", 0),
        ("<think>a<think>b</think>c", 0),
        ("<think>a</think>b</think>c", 0),
        ("", 0),
    ],
)
def test_format(completion: str, reward: float) -> None:
    assert think_format("", completion, "") == reward


def test_math(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal numbers in other forms are right; what sympy never ends with is wrong, and the next answer is looked at."""
    pytest.importorskip("math_verify")
    right = [
        ("The answer is 42.", "42"),
        ("so \\boxed{\\frac{1}{2}}", "0.5"),
        ("$\\sqrt{8}$", "2\\sqrt{2}"),
        ("We get 1,234 dollars", "1 + 1233\n#### 1,234"),
        ("\\boxed{\\{1,2\\}}", "\\boxed{\\{2,1\\}}"),
        ("\\boxed{7}", "$7$"),
    ]
    wrong = [("no number", "7"), ("", "7"), ("\\boxed{", "7"), ("7 and then 8", "7"), ("\\boxed{0.49}", "\\frac12")]
    assert [math_equal("", *case) for case in right + wrong] == [1.0] * len(right) + [0.0] * len(wrong)
    pairs = [(f"\\boxed{{{number}}}", f"{number * (number % 2)}") for number in range(1, 41)]
    workers = Workers(4)  # one read the verdict on another's question, and that one waited for ever
    found = [workers.submit(partial(math_equal, "", *pair)) for pair in pairs]
    assert [each.result(30) for each in found] == [number % 2 for number in range(1, 41)]
    if not (child := os.fork()):  # which would read the parent's answers
        os._exit(checkers._worker._process is not None)
    assert os.waitpid(child, 0)[1] == 0
    monkeypatch.setattr(checkers, "_SECONDS", 0.5)
    assert math_equal("", "\\boxed{9^{9^{9^9}}}", "7") == 0
    monkeypatch.undo()
    with pytest.raises(TimeLimitExceeded):
        within(0.2, partial(math_equal, "", "\\boxed{9^{9^{9^9}}}", "7"))
    assert math_equal("", "\\boxed{7}", "7") == 1


def test_math_that_is_not_installed_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install math-verify"):
        reward_function("math")


def test_extras_reach_a_checker_that_asks_for_them() -> None:
    def by_level(prompt: str, completion: str, answer: str, extra: Mapping[str, Any]) -> float:
        return float(extra.get("level", -1))

    texts = (["a", "b"], ["c", "d"], ["e", "f"])
    assert reward_function(by_level)(*texts, [{"level": 3}, {}]).tolist() == [3, -1]
    assert reward_function(by_level)(*texts).tolist() == [-1, -1]
    assert reward_function(lambda prompt, completion, answer: 1.0)(*texts, [{"level": 3}, {}]).tolist() == [1, 1]
    with serve(lambda number, body: (200, {"rewards": [len(json.dumps(body.get("extras", ""))), 0]})) as server:
        reward_function(server.url)(*texts, [{}, {}])
        reward_function(server.url)(*texts, [{"level": 3}, {}])
        assert "extras" not in server.requests[0] and server.requests[1]["extras"] == [{"level": 3}, {}]
