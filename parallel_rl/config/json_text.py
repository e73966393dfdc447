"""JSON from outside: any fault is a ValueError, and so is a duplicate key."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence

_INT64 = 1 << 63
_FLOAT32 = 3.4028234663852886e38


def parse_json(text: str | bytes) -> object:
    """Parse JSON.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: duplicate key 'a'

    ValueError: no JSON (a `json.JSONDecodeError` with the place), a duplicate key, an integer beyond Python's 4,300 digits, or
    brackets nested too deep.
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"brackets are nested deeper than about {sys.getrecursionlimit():,} levels") from None
    except ValueError as error:
        if "digits" in str(error) and "conversion" in str(error):
            raise ValueError("an integer has more digits than Python reads, 4,300") from None
        raise
    return value


def is_int64(value: object) -> bool:
    """Return whether a value is an integer of 64 bits; False for bools."""
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64


def is_finite(value: object) -> bool:
    """Return whether a value is a number that is finite in float32, as losses need; False for bools.

    >>> is_finite(3), is_finite(1e39), is_finite(10**400), is_finite(float("nan")), is_finite(True)
    (True, False, False, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_FLOAT32 <= value <= _FLOAT32


def all_int64(values: Sequence[object]) -> bool:
    """Return whether `is_int64` holds for every value, at C speed."""
    return {*map(type, values)} <= {int} and _between(values, -_INT64, _INT64 - 1)


def all_finite(values: Sequence[object]) -> bool:
    """Return whether `is_finite` holds for every value, at C speed.

    >>> all_finite([3, 0.5]), all_finite([1e39]), all_finite([10**400, 0.5]), all_finite([float("nan")])
    (True, False, False, False)
    """
    return {*map(type, values)} <= {int, float} and _between(values, -_FLOAT32, _FLOAT32)


def _between(values: Sequence[object], least: float, most: float) -> bool:
    try:
        if not all(map(math.isfinite, values)):  # type: ignore[arg-type]  # numbers
            return False
    except OverflowError:  # an integer without a float64
        return False
    return not values or bool(least <= min(values) and max(values) <= most)  # type: ignore[type-var, operator]


def brief(value: object, most: int = 100) -> str:
    """Show a value in at most `most` characters."""
    text = _repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (RecursionError, ValueError):  # nested too deep, or an integer with more digits than Python writes
        return f"a value of type {type(value).__name__} that is too large to show"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {brief(next(key for key in keys if keys.count(key) > 1))}")
    return tree
