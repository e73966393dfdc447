"""Reward functions, given as a registered name, a server, or a Python callable."""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl.agreement import Unavailable, describe, raise_on_all_ranks, sum_over_groups
from parallel_rl.config.json_text import brief, is_finite
from parallel_rl.config.names import is_left, not_registered
from parallel_rl.config.shown import shown
from parallel_rl.config.strict import configure
from parallel_rl.experience import failures
from parallel_rl.experience.checkers import check_math, exact_match, math_equal, think_format
from parallel_rl.groups import group_rank
from parallel_rl.servers.http_reward import HTTPReward, HTTPRewardConfig, Scored, split_score

# (prompt, completion, answer) -> reward of a completion without end token, or {"reward": number, ...} with fields of a loss.
# An argument `extra` gets the record's other columns, `tokens` the completion's ids with the end token.
Checker = Callable[..., float | Mapping[str, object]]
Extra = Mapping[str, object]

_CHECKERS: dict[str, Checker] = {"exact_match": exact_match, "math": math_equal, "format": think_format}
# rewards that return no fields
NUMBERS_ONLY = tuple(_CHECKERS)
_MAY_READ = ("extra", "tokens")


class RewardFunction(Protocol):
    """(prompts, completions, answers) of N samples -> [N] float64.

    An answer is any JSON value, `extras` the records' other columns, `tokens` the completions' ids. `score` returns faults of
    single samples instead of raising the first, and further fields.
    """

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[object],
        extras: Sequence[Extra] | None = None,
    ) -> Tensor: ...

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[object],
        extras: Sequence[Extra] | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> Scored: ...


def register_reward(name: str) -> Callable[[Checker], Checker]:
    """Register a checker under a name; a decorator.

    >>> @register_reward("doc_length")
    ... def length(prompt: str, completion: str, answer: str) -> float:
    ...     return len(completion)
    >>> reward_function("doc_length")(["1+1="], ["two"], ["2"])
    tensor([3.], dtype=torch.float64)

    Raises:
        ValueError: the name is taken, or has a colon; the function takes other arguments.
    """

    if name in _CHECKERS:
        raise ValueError(f"reward {name!r} is registered already")
    if ":" in name:
        raise ValueError(f"reward name {name!r} must not have a colon: colons mark URLs")

    def register(function: Checker) -> Checker:
        _check_signature(name, function)
        _CHECKERS[name] = function
        return function

    return register


def checker(name: str) -> Checker:
    """Return the registered checker, importing nothing; ValueError for an unknown name, with the nearest."""
    if name == "math":
        check_math()
    if name in _CHECKERS:
        return _CHECKERS[name]
    if "://" in name:
        raise ValueError(f"reward = {shown(name)} is not valid; a server's URL starts with http:// or https://")
    if is_left("reward", name):
        return exact_match  # never called: `check` only needs a checker
    raise ValueError(not_registered("reward", name, _CHECKERS, "register_reward"))


def named_reward(reward: object, where: str = "reward") -> str | HTTPRewardConfig:
    """Parse a config's reward: a registered name, or a server by its URL or its options.

    >>> named_reward("exact_match"), named_reward("http://judge:8000/score").url
    ('exact_match', 'http://judge:8000/score')

    Raises:
        ValueError: neither, or invalid options; `checker` checks whether the name is registered.
    """
    if isinstance(reward, str):
        return HTTPRewardConfig(reward) if reward.startswith(("http://", "https://")) else reward
    if isinstance(reward, (HTTPRewardConfig, Mapping)):
        return configure(HTTPRewardConfig, reward, where)
    raise ValueError(f"{where} = {shown(reward)} is not valid; a name, a server's URL or its options are needed")


def reward_function(reward: str | Checker | HTTPRewardConfig | Mapping, timeout: float | None = None) -> RewardFunction:
    """Build a batch reward function from its config.

    >>> reward_function("exact_match")(["1+1="], ["2"], ["2"])
    tensor([1.], dtype=torch.float64)

    Args:
        reward: a registered name, a URL ("http://..."), the options of a server (`HTTPRewardConfig`), or a function (prompt,
            completion, answer) -> float or {"reward": float, ...}, optionally with `extra`, a mapping, and `tokens`, ids.
        timeout: seconds for each call of a Python function; None: no limit. A server has a `timeout` of its own.

    Returns:
        [N] float64 on the host, from (prompts, completions, answers), N strings each, and `extras`, N mappings. If a Python
        function raises, or returns no number that is finite in float32, a ValueError names the sample; for servers see
        `HTTPReward`.

    Raises:
        ValueError: an unregistered name, a function with other arguments, or invalid options.
    """
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"timeout = {timeout} of a reward function must be positive and finite")
    if callable(reward):
        name = getattr(reward, "__name__", repr(reward))
        _check_signature(name, reward)
        return _Checked(reward, name, timeout)
    named = named_reward(reward)
    return HTTPReward(named) if isinstance(named, HTTPRewardConfig) else _Checked(checker(named), named, timeout)


def score_once(
    score: Callable[[], Tensor],
    count: int,
    sharing: Sequence[ProcessGroup | None] = (),
    data: ProcessGroup | None = None,
) -> Tensor:
    """Score samples that several ranks hold on the first of them, and broadcast: [N] float64 on the host.

    Args:
        score: returns [N]; called on the first rank of every group of `sharing`.
        count: N.
        sharing: the groups whose ranks hold the same samples (tensor, context, pipeline). data: the ranks that hold others.

    Raises:
        ValueError: `score` raised on some rank; on all of them, so none waits.
    """
    first = all(group_rank(group) == 0 for group in sharing)

    def ask() -> Tensor:
        rewards = torch.zeros(count, dtype=torch.float64)
        return rewards.copy_(score()) if first else rewards

    return sum_over_groups(raise_on_all_ranks(ask, [*sharing, data]), sharing)


class RewardTimeout(ValueError):
    """A reward function took longer than its time limit for one sample."""


class _Checked:
    def __init__(self, function: Checker, name: str, timeout: float | None) -> None:
        self.function, self.name, self._reads, self._timeout = function, name, _reads(function), timeout

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[object],
        extras: Sequence[Extra] | None = None,
    ) -> Tensor:
        return self.score(prompts, completions, answers, extras).checked()

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[object],
        extras: Sequence[Extra] | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> Scored:
        failures.check_time_limit(self._timeout)
        values, faults, fields = list[float](), dict[int, Exception](), list[Mapping[str, object]]()
        others: Sequence[Extra] = [{}] * len(prompts) if extras is None else extras
        for index, (*sample, extra) in enumerate(zip(prompts, completions, answers, others, strict=True)):
            values.append(math.nan)
            fields.append({})
            arguments: dict[str, object] = {"extra": extra} | ({} if tokens is None else {"tokens": tokens[index]})
            try:
                options = {name: arguments[name] for name in self._reads if name in arguments}
                value: object = failures.within(self._timeout, partial(self.function, *sample, **options))
            except Unavailable:  # a server that may answer later
                raise
            except failures.TimeLimitExceeded as error:
                what = f"took longer than timeout = {self._timeout:g} seconds{_place(error)}"
                faults[index] = RewardTimeout(f"reward {self.name!r} of sample {index} {what}")
                continue
            except Exception as error:
                what = f"reward {self.name!r} of sample {index} failed{_place(error)}: {describe(error)}"
                faults[index] = ValueError(what)
                faults[index].__cause__ = error
                continue
            reward, others_of_sample = split_score(value)
            if is_finite(number := _number(reward)):
                values[-1], fields[-1] = number, others_of_sample
            else:
                faults[index] = ValueError(
                    f"reward {self.name!r} of sample {index} is {brief(value)}; a finite number is needed (in float32), or "
                    "{'reward': number, ...}"
                )
        return Scored(torch.tensor(values, dtype=torch.float64), faults, fields)


def _signature(function: Checker) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return None


def _reads(function: Checker) -> tuple[str, ...]:
    signature = _signature(function)
    return () if signature is None else tuple(name for name in _MAY_READ if name in signature.parameters)


def _check_signature(name: str, function: Checker) -> None:
    if (signature := _signature(function)) is None:
        return
    try:
        signature.bind("prompt", "completion", "answer", **dict.fromkeys(_reads(function)))
    except TypeError as error:
        raise ValueError(
            f"reward {name!r} takes {signature}, but is called with (prompt, completion, answer), and with extra= and tokens= "
            f"where it has such arguments: {error}"
        ) from None


def _place(error: BaseException) -> str:
    callers = (__file__, failures.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in callers][:1]
    return "".join(f" at {frame.filename}:{frame.lineno}" for frame in frames)


def _number(value: object) -> float:
    """Convert to a number, NaN for anything else; one-element tensors and numpy numbers are numbers."""
    if getattr(value, "ndim", None) == 0:  # torch's or numpy's, whose truth values are no numbers
        value = value.item()  # type: ignore[attr-defined]
    try:
        return float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # an integer
        return math.inf
