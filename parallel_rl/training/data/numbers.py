"""Numbers of a row: checked values and lists, and the values of the user's own fields."""

from __future__ import annotations

from collections.abc import Sequence

from parallel_rl.config.json_text import all_finite, all_int64, brief, is_finite, is_int64
from parallel_rl.losses.core.requirements import Field
from parallel_rl.training.data.format import Row, field_of

# values of the user's own fields: of the sequence, or of each token
Own = tuple[float | tuple[float, ...], ...]


def own_values(row: Row, fields: Sequence[Field], count: int = 0) -> Own:
    """Read the values of the user's own fields, in order: a number of the sequence, or `count` of its tokens."""
    values: list[float | tuple[float, ...]] = []
    for declared in fields:
        name, integer = declared.name, declared.dtype == "integer"
        if name not in row:
            raise ValueError(f"the field {name!r} is missing; the loss declares it")
        if declared.per == "sequence":
            values.append(checked_number(_as_numbers(row[name], declared), name, integer))
            continue
        numbers = numbers_of({name: _as_numbers(row[name], declared)}, name, integer)
        if len(numbers) != count:
            raise ValueError(f"{name!r} has {len(numbers)} values for {count} 'logprobs'; one for each is needed")
        values.append(tuple(numbers))
    return tuple(values)


def _as_numbers(value: object, declared: Field) -> object:
    """Convert true and false of a label or a mask to 1 and 0."""
    if declared.dtype not in ("label", "mask"):
        return value
    if isinstance(value, list):
        return [_as_numbers(one, declared) for one in value]
    return int(value) if isinstance(value, bool) else value


def numbers_of(row: Row, key: str, integer: bool = False) -> Sequence[float]:
    """Read a list of finite numbers; ValueError names the first that is none."""
    items = field_of(row, key)
    if not isinstance(items, list):
        raise ValueError(f"{key!r} = {brief(items)} is not valid; a list is needed")
    # thousands of them in each row: one by one only where one is wrong
    if not (all_int64(items) if integer else all_finite(items)):
        for index, item in enumerate(items):
            checked_number(item, f"{key}[{index}]", integer)
    return items


def checked_number(value: object, name: str, integer: bool = False) -> float:
    """Return a finite number; ValueError for any other value."""
    if not (is_int64(value) if integer else is_finite(value)):
        needed = "an integer of 64 bits" if integer else "a number that is finite in float32"
        raise ValueError(f"{name} = {brief(value)} is not valid; {needed} is needed")
    return value  # type: ignore[return-value]  # a number
