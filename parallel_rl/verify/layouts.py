"""Layouts by the words of the command line: `tp=1,2 cp=1,2`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from parallel_rl.config.strict import nearest
from parallel_rl.layout import CPLayout
from parallel_rl.testing.layouts import Layout

_PACKINGS = ("padded", "packed", "packed+padding", "tree")
_CP_LAYOUTS: tuple[CPLayout, ...] = ("zigzag", "contiguous")
_AXES = ("tp", "cp", "dp", "pp", "micro", "packing", "cp_layout")


def of_words(words: Sequence[str]) -> list[Layout]:
    """Parse `tp=1,2 cp=1,2` into the product of layouts.

    >>> [layout.name for layout in of_words(["tp=1,2", "packing=packed"])]
    ['tp1.cp1.dp1.packed.mb1.zigzag', 'tp2.cp1.dp1.packed.mb1.zigzag']

    Raises:
        ValueError: an unknown axis, or a value that is none of it.
    """
    given: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if name not in _AXES or not equals or name in given:
            why = "is given twice" if name in given else f"is not AXIS=VALUE,VALUE; {nearest(name, _AXES)}"
            raise ValueError(f"--layouts {word} {why}")
        given[name] = values.split(",")
    sizes = [[_size(name, value) for value in given.get(name, ["1"])] for name in _AXES[:5]]
    packings, of_context = _listed(given, "packing", _PACKINGS), _listed(given, "cp_layout", _CP_LAYOUTS)
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


def _listed(given: dict[str, list[str]], name: str, known: Sequence[str]) -> list[str]:
    values = given.get(name, [known[0]])
    for value in values:
        if value not in known:
            raise ValueError(f"--layouts {name}={value} is not valid; {nearest(value, known)}")
    return values
