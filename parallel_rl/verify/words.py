"""Losses, frameworks and layouts from command-line arguments, such as `tp=1,2 cp=1,2`."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import get_args

from parallel_rl.config.strict import nearest
from parallel_rl.hosts.function_loss import FunctionLoss
from parallel_rl.hosts.registry import FRAMEWORKS, part
from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.registry import get_loss, losses
from parallel_rl.testing.batches import PLACEHOLDER, REWARD_IDS
from parallel_rl.testing.cases import Case, Subject
from parallel_rl.testing.layouts import Layout
from parallel_rl.testing.subjects import subject_of

_NEEDED: dict[str, dict[str, object]] = {  # options without a default
    "prm": {"placeholder_token_id": PLACEHOLDER, "reward_token_ids": REWARD_IDS},
    "components": {
        "components": {
            "policy": {"loss": {"name": "policy"}},
            "nll": {"loss": {"name": "nll"}, "coefficient": 0.1, "mask": "observation_mask"},
        }
    },
}


def every_loss() -> list[Subject]:
    """Return all registered losses with default options; print the others' names on standard error."""
    cases: list[Subject] = []
    for name in losses():
        case = Case(name, _NEEDED.get(name, {}))
        try:
            case.build()
        except ValueError as error:
            print(f"{name} is left out, give it by --loss and --options: {error}", file=sys.stderr)
        else:
            cases.append(case)
    return cases


def find_loss(text: str, options: dict[str, object], fields: tuple[str, ...] = ()) -> Subject:
    """Find a registered loss, or a user's `module:object`: a class, instance, function or registered name.

    >>> find_loss("nll", {"aggregation": "seq-mean-token-mean"}).name
    'nll-aggregation=seq-mean-token-mean'

    Raises:
        ValueError: a module that does not import, an object that it lacks or that is not a loss, options that do not fit.
    """
    module, colon, name = text.rpartition(":")
    loss: object = _imported(module, name) if colon else get_loss(name)
    if isinstance(loss, type) and issubclass(loss, LossFn):
        case = Case(loss, {**_NEEDED.get(name, {}), **options})
        case.build()  # options that do not fit are refused here
        return case
    if options:
        raise ValueError(f"--options has no effect on {text}, which is not a class; build it with these options")
    if fields and callable(loss) and not isinstance(loss, LossFn):
        return FunctionLoss(loss, fields)
    return subject_of(loss)  # type: ignore[arg-type]


def _imported(module: str, name: str) -> object:
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # of the user's module
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
    names = [key for key, value in classes.items() if issubclass(value, LossFn)]
    raise ValueError(
        f"--loss {module}:{name}: {module} has no {name!r}, and none is registered; {nearest(name, names)}"
    )


_PACKINGS = ("padded", "packed", "packed+padding", "tree")
_CP_LAYOUTS: tuple[CPLayout, ...] = ("zigzag", "contiguous")
_AXES = ("tp", "cp", "dp", "pp", "micro", "packing", "cp_layout")


def of_words(words: Sequence[str]) -> list[Layout]:
    """Parse `tp=1,2 cp=1,2` into the product of layouts; ValueError for an unknown axis or value.

    >>> [layout.name for layout in of_words(["tp=1,2", "packing=packed"])]
    ['tp1.cp1.dp1.packed.mb1.zigzag', 'tp2.cp1.dp1.packed.mb1.zigzag']
    """
    values_of: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if name not in _AXES or not equals or name in values_of:
            why = "is given twice" if name in values_of else f"is not AXIS=VALUE,VALUE; {nearest(name, _AXES)}"
            raise ValueError(f"--layouts {word} {why}")
        values_of[name] = values.split(",")
    sizes = [[_size(name, value) for value in values_of.get(name, ["1"])] for name in _AXES[:5]]
    packings, of_context = _listed(values_of, "packing", _PACKINGS), _listed(values_of, "cp_layout", _CP_LAYOUTS)
    return [
        Layout(tp, cp, dp, packing, micro, cp_layout, pp)
        for tp, cp, dp, pp, micro in itertools.product(*sizes)
        for packing in packings
        for cp_layout in _CP_LAYOUTS
        if (cp_layout in of_context if cp > 1 else cp_layout == "zigzag")
    ]


def _size(name: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"--layouts {name}={value} is not valid; a positive number is needed")
    return int(value)


def _listed(values_of: dict[str, list[str]], name: str, known: Sequence[str]) -> list[str]:
    values = values_of.get(name, [known[0]])
    for value in values:
        if value not in known:
            raise ValueError(f"--layouts {name}={value} is not valid; {nearest(value, known)}")
    return values


def through_host(host: str, subject: Subject) -> Subject:
    """Adapt a subject's loss to a host's call; ValueError for an unknown host or an unsuitable loss.

    >>> from parallel_rl.testing import Case
    >>> through_host("verl", Case("policy")).name
    'policy through verl'
    """
    if host not in FRAMEWORKS:
        raise ValueError(f"--through {host}: unknown host; supported are {', '.join(FRAMEWORKS)}")
    loss_fn = subject.build()
    if not isinstance(loss_fn, LossFn):
        raise ValueError(f"--through {host} takes a LossFn, which {subject.name} is not")
    adapted: FunctionLoss = part(FRAMEWORKS[host].law).through(loss_fn)
    adapted.call.__name__ = f"{subject.name} through {host}"
    return adapted
