"""Checkers: from a completion to a reward."""

from __future__ import annotations

import importlib
from collections.abc import Callable

# (prompt, completion, answer) -> reward. The completion ends before its end token.
Checker = Callable[[str, str, str], float]


def exact_match(prompt: str, completion: str, answer: str) -> float:
    """1 where the completion is the answer, to the character; else 0."""
    return float(completion == answer)


_CHECKERS: dict[str, Checker] = {"exact_match": exact_match}


def checker(name: str) -> Checker:
    """The checker of that name, or the function that "module:function" names.

    Raises:
        ValueError: an unknown name, a module that does not import, or an attribute that is missing or not callable.
    """
    if name in _CHECKERS:
        return _CHECKERS[name]
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"reward = {name!r} is not valid; choose {', '.join(_CHECKERS)} or write 'module:function'")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward = {name!r} cannot be loaded: {error}") from None
    if not callable(found):
        raise ValueError(
            f"reward = {name!r} is a {type(found).__name__}; a function (prompt, completion, answer) is needed"
        )
    named: Checker = found
    return named
