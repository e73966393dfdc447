"""Losses by the words of the command line."""

from __future__ import annotations

import importlib
import sys
from typing import get_args

from parallel_rl.config.strict import nearest
from parallel_rl.hosts.function_loss import FunctionLoss
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.registry import get_loss, losses
from parallel_rl.testing.batches import PLACEHOLDER, REWARD_IDS
from parallel_rl.testing.cases import Case, Subject
from parallel_rl.testing.subjects import subject_of

_NEEDED: dict[str, dict[str, object]] = {  # what has no default
    "prm": {"placeholder_token_id": PLACEHOLDER, "reward_token_ids": REWARD_IDS},
    "components": {
        "components": {
            "policy": {"loss": {"name": "policy"}},
            "nll": {"loss": {"name": "nll"}, "coefficient": 0.1, "mask": "observation_mask"},
        }
    },
}


def every_loss() -> list[Subject]:
    """Return all registered losses with default options; name those without on standard error."""
    found: list[Subject] = []
    for name in losses():
        case = Case(name, _NEEDED.get(name, {}))
        try:
            case.build()
        except ValueError as error:
            print(f"{name} is left out, give it by --loss and --options: {error}", file=sys.stderr)
        else:
            found.append(case)
    return found


def find_loss(text: str, options: dict[str, object], fields: tuple[str, ...] = ()) -> Subject:
    """Find a registered loss, or the `module:object` of a user.

    The object is a class, an instance, a function with the call of `LossFn`, or the name of a registered loss.

    >>> find_loss("nll", {"aggregation": "seq-mean-token-mean"}).name
    'nll-aggregation=seq-mean-token-mean'

    Raises:
        ValueError: a module that does not import, an object that it lacks or that is not a loss, options that do not fit.
    """
    module, colon, name = text.rpartition(":")
    found: object = _imported(module, name) if colon else get_loss(name)
    if isinstance(found, type) and issubclass(found, LossFn):
        case = Case(found, {**_NEEDED.get(name, {}), **options})
        case.build()  # options that do not fit are refused here
        return case
    if options:
        raise ValueError(f"--options has no effect on {text}, which is not a class; build it with these options")
    if fields and callable(found) and not isinstance(found, LossFn):
        return FunctionLoss(found, fields)
    return subject_of(found)  # type: ignore[arg-type]


def _imported(module: str, name: str) -> object:
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's module does
        raise ValueError(
            f"--loss {module}:{name}: {module} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    if hasattr(imported, name):
        return getattr(imported, name)
    known = losses()
    if name in known:
        return known[name]
    # an alias such as list[int] passes for a class in Python 3.10
    classes = {key: value for key, value in vars(imported).items() if isinstance(value, type) and not get_args(value)}
    own = [key for key, value in classes.items() if issubclass(value, LossFn)]
    raise ValueError(f"--loss {module}:{name}: {module} has no {name!r}, and none is registered; {nearest(name, own)}")
