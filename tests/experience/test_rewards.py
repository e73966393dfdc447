"""Reward functions by name and as Python callables."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel_rl.agreement import Unavailable
from parallel_rl.experience import register_reward, reward_function
from parallel_rl.experience.failures import score_again
from parallel_rl.experience.rewards import RewardTimeout, checker, exact_match, score_once
from parallel_rl.servers.http_reward import Scored
from parallel_rl.testing.pool import WorldError, run_world

TEXTS = (["1+1=", "2+2="], ["2", "5"], ["2", "4"])


def half(prompt: str, completion: str, answer: str) -> float:
    return 0.5


def test_the_ways_to_name_one() -> None:
    assert reward_function("exact_match")(*TEXTS).tolist() == [1, 0]
    assert reward_function(half)(*TEXTS).tolist() == [0.5, 0.5]
    assert reward_function(lambda prompt, completion, answer: len(prompt))(*TEXTS).tolist() == [4, 4]
    assert reward_function(half)([], [], []).shape == (0,)
    assert checker("exact_match") is exact_match


def test_a_registered_one() -> None:
    register_reward("always_three_for_this_test")(lambda prompt, completion, answer: 3)
    assert reward_function("always_three_for_this_test")(*TEXTS).tolist() == [3, 3]
    with pytest.raises(ValueError, match="reward 'exact_match' is registered already"):
        register_reward("exact_match")
    with pytest.raises(ValueError, match="must not have a colon"):
        register_reward("a:b")


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), np.True_, torch.tensor(1.0), torch.tensor(1)])
def test_what_counts_as_a_number(value: float) -> None:
    assert reward_function(lambda prompt, completion, answer: value)(["a"], ["b"], ["c"]).tolist() == [1]


@pytest.mark.parametrize(
    "value", ["1", None, float("nan"), float("inf"), 10**400, 1e39, [1.0], torch.ones(1), np.ones(1)]
)
def test_what_does_not(value: float) -> None:
    def odd(prompt: str, completion: str, answer: str) -> float:
        return value if prompt == "b" else 0.0

    with pytest.raises(ValueError, match=r"reward 'odd' of sample 1 is .*; a finite number is needed"):
        reward_function(odd)(["a", "b"], ["", ""], ["", ""])


def test_one_that_raises_is_told_with_its_sample_and_line() -> None:
    """A traceback of thirty lines had neither; a server that is away stays what it is, for the run to stop and go on."""

    def odd(prompt: str, completion: str, answer: str) -> float:
        return 1 / len(completion)

    line = odd.__code__.co_firstlineno + 1
    told = rf"^reward 'odd' of sample 1 failed at .*test_rewards.py:{line}: ZeroDivisionError: division by zero$"
    with pytest.raises(ValueError, match=told) as caught:
        reward_function(odd)(["a", "b"], ["x", ""], ["", ""])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ValueError, match=r"'exact_match' of sample 0 failed at .*checkers.py:\d+: TypeError"):
        reward_function("exact_match")([""], [""], [{1}])  # a set is no JSON

    def away(prompt: str, completion: str, answer: str) -> float:
        raise Unavailable("the judge starts")

    with pytest.raises(Unavailable, match=r"^the judge starts$"):
        reward_function(away)(["a"], ["b"], ["c"])


def test_a_sample_that_fails_is_scored_again_and_then_left() -> None:
    """The others keep their rewards, and are scored once."""
    calls: list[str] = []

    def unsteady(prompt: str, completion: str, answer: str) -> float | None:
        calls.append(prompt)
        if prompt == "once" and calls.count(prompt) == 1:
            raise TimeoutError("the judge was busy")
        return None if prompt == "never" else 1.0

    prompts, reward = ["well", "once", "never"], reward_function(unsteady)

    def score(rows: Sequence[int]) -> Scored:
        return reward.score([prompts[row] for row in rows], [""] * len(rows), [""] * len(rows))

    rewards, faults, _ = score_again(score, 3, 2)
    assert rewards[:2].tolist() == [1, 1] and rewards[2].isnan() and list(faults) == [2]
    assert str(faults[2]).startswith("reward 'unsteady' of sample 2 is None; a finite number is needed")
    assert [calls.count(prompt) for prompt in prompts] == [1, 2, 3]
    assert score_again(score, 3, 0).faults.keys() == {2}


def sleeps() -> None:
    time.sleep(60)


def loops() -> None:
    while True:
        pass


def hides_it() -> None:
    """It comes again where the function catches it; the pool waits for its thread."""
    try:
        loops()
    except BaseException:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(time.sleep, 1.5)


def ignores_errors() -> None:
    while True:
        with contextlib.suppress(Exception):
            re.match("(a+)+$", 40 * "a" + "b")


@pytest.mark.parametrize("wait", [sleeps, loops, hides_it, ignores_errors])
def test_a_sample_that_takes_for_ever_ends_at_the_limit(wait: Callable[[], None]) -> None:
    """The others keep their rewards; handler and timer of the process are as before."""

    def slow(prompt: str, completion: str, answer: str) -> float:
        if completion == "x":
            wait()
        return 1.0

    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    rewards, faults, _ = reward_function(slow, timeout=0.05).score(["a"] * 3, ["", "x", ""], [""] * 3)
    assert time.monotonic() - began < 5
    assert rewards[[0, 2]].tolist() == [1, 1] and rewards[1].isnan() and faults.keys() == {1}
    line = slow.__code__.co_firstlineno + 2
    told = rf"reward 'slow' of sample 1 took longer than timeout = 0.05 seconds at .*test_rewards.py:{line}"
    assert isinstance(faults[1], RewardTimeout)
    assert re.fullmatch(told, str(faults[1])) or wait is hides_it
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_time_limit_that_cannot_be_kept_is_refused() -> None:
    limited = reward_function(half, timeout=5)
    assert limited(*TEXTS).tolist() == [0.5, 0.5]
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ValueError, match=r"timeout = 5 of a reward function needs the main"),
    ):
        pool.submit(limited, *TEXTS).result()
    for timeout in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"timeout = {timeout} of a reward function must be positive and finite"):
            reward_function(half, timeout=timeout)


def test_one_of_other_arguments_is_refused_at_once() -> None:
    """It failed in the first step, after the warm-up."""
    for wrong, cause in (
        (lambda completion, answer: 1.0, "too many positional arguments"),
        (lambda prompt, completion, answer, level: 1.0, "missing a required argument: 'level'"),
        (lambda prompt, completion, answer, *, level, extra: 1.0, "missing a required"),
    ):
        for take in (reward_function, register_reward("wrong_for_this_test")):
            with pytest.raises(ValueError, match=rf"takes \(.*answer.*\), but is called with .*: {cause}"):
                take(wrong)
    for right in (
        lambda *texts: 1.0,
        lambda prompt, completion, answer, level=1: 1.0,
        lambda p, c, a, *, extra: 1.0,
        max,  # has no signature
    ):
        register_reward(f"right_{id(right)}_for_this_test")(right)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "reward = 'exact_mach' is not valid; did you mean 'exact_match'"),
        ("os:system", r'imports nothing; register it by @register_reward\("system"\) and pass --import os$'),
        (7, "reward = 7 is not valid; a name, a server's URL or its options"),
    ],
)
def test_bad_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_function(name)
    with pytest.raises(ValueError):
        reward_function("exact_match")(["a"], [], [])


def shared(rank: int) -> list[float]:
    return score_once(lambda: torch.tensor([rank + 1.5, rank - 0.5]), 2, [None, dist.group.WORLD]).tolist()


def failing(rank: int, who: int, shares: bool) -> None:
    def score() -> torch.Tensor:
        if rank == who:
            raise RuntimeError("the server is down")
        return torch.zeros(2)

    score_once(score, 2, [dist.group.WORLD] if shares else [], None if shares else dist.group.WORLD)


def test_ranks_with_the_same_samples_ask_once() -> None:
    assert run_world(2, shared) == [[1.5, -0.5]] * 2
    assert score_once(lambda: torch.tensor([2.0]), 1).tolist() == [2]


@pytest.mark.parametrize(("who", "shares"), [(0, True), (1, False)])
def test_a_reward_function_that_fails_on_one_rank_is_an_error_on_all(who: int, shares: bool) -> None:
    with pytest.raises(WorldError, match=f"rank {who}: RuntimeError: the server is down") as caught:
        run_world(2, failing, who, shares, timeout=60)
    assert len(caught.value.errors) == 2
