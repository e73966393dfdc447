"""`check_law` as a one-line test of a user's repository."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec

from parallel_rl.testing.check import LIMITS, WORLDS, Limits, check_law
from parallel_rl.testing.subjects import Loss

P = ParamSpec("P")


def law_test(
    worlds: Sequence[int] = WORLDS, limits: Limits = LIMITS
) -> Callable[[Callable[P, Loss]], Callable[P, None]]:
    """Make a test of a function that returns a loss; a failure prints the diagnosis.

        @law_test()
        def test_my_loss():
            return MyLoss({"beta": 0.1})

    The function may take fixtures and parameters, as any test.

    >>> @law_test(worlds=[1])
    ... def test_nll():
    ...     return "nll"
    >>> test_nll()

    Args:
        worlds, limits: of `check_law`.
    """

    def decorate(make: Callable[P, Loss]) -> Callable[P, None]:
        @functools.wraps(make)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            check_law(make(*args, **kwargs), worlds, limits=limits).raise_if_broken()

        return test

    return decorate
