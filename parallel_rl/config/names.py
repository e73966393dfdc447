"""Names of registered code: a config looks them up and imports nothing; the command line names the modules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from parallel_rl.config.strict import nearest

ENVIRONMENT = "PARALLEL_RL_IMPORT"
_RECIPES = Path(__file__).parents[1] / "configs" / "recipes"

_LEFT: ContextVar[dict[str, None] | None] = ContextVar("_LEFT", default=None)


def not_registered(what: str, name: str, known: Iterable[str], decorator: str) -> str:
    """Describe a wrong name of `what`, such as "reward", and the decorator that would register it.

    >>> not_registered("reward", "my_rewards:close", ["math"], "register_reward")
    'reward = \\'my_rewards:close\\' is not valid: a config imports nothing; register it by @register_reward("close") and \
    pass --import my_rewards'
    """
    module, colon, attribute = name.rpartition(":")
    if colon and module and "/" not in name:
        return (
            f'{what} = {name!r} is not valid: a config imports nothing; register it by @{decorator}("{attribute}") and '
            f"pass --import {module}"
        )
    if what == "loss" and (_RECIPES / f"{name}.yaml").is_file():
        return (
            f"loss = {name!r} is not valid: it is a recipe, a loss with options; `parallel-rl train --recipe {name}` runs it, "
            f"parallel_rl.load_recipe({name!r}) gives both"
        )
    return (
        f"{what} = {name!r} is not valid; {nearest(name, known)} (one of your own: @{decorator} in a module that "
        "--import names)"
    )


@contextmanager
def left_to_ranks(modules: Sequence[str]) -> Iterator[list[str]]:
    """Accept unregistered names as those of `modules`, which only the ranks import.

    >>> with left_to_ranks(["my_rewards"]) as lines:
    ...     assert is_left("reward", "close")
    >>> lines
    ["not looked at: reward 'close', which my_rewards is to register when the ranks import it"]

    Yields lines on these names, once the block is done.
    """
    lines: list[str] = []
    before = _LEFT.set({} if modules else None)
    try:
        yield lines
        accepted = _LEFT.get() or {}
        lines += [
            f"not looked at: {name}, which {' or '.join(modules)} is to register when the ranks import it"
            for name in accepted
        ]
    finally:
        _LEFT.reset(before)


def is_left(what: str, name: str) -> bool:
    """Return whether `left_to_ranks` accepts an unregistered name; it never accepts "module:name"."""
    accepted = _LEFT.get()
    if accepted is None or not name.isprintable() or ":" in name:
        return False
    accepted[f"{what} {name!r}"] = None
    return True


def modules_of_user(names: Sequence[str]) -> list[str]:
    """List the modules of --import, then PARALLEL_RL_IMPORT's (by commas); ValueError for a bad name."""
    words = {f"--import {name}": name for name in names}
    for name in filter(None, os.environ.get(ENVIRONMENT, "").split(",")):
        words.setdefault(f"{ENVIRONMENT} = {name}", name.strip())
    for where, name in words.items():
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{where} is not a module's name, such as my_rewards or my_package.rewards")
    return list(dict.fromkeys(words.values()))
