"""Read a source's rows: columns of its fields, checked numbers, prompt and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parallel_rl.config.json_text import all_finite, all_int64, brief, is_finite, is_int64
from parallel_rl.config.strict import closest, nearest
from parallel_rl.losses.core.requirements import Field
from parallel_rl.training.config.data import FIELDS
from parallel_rl.training.tokenizer.protocol import Target, Tokenizer

Row = Mapping[str, object]
Fields = dict[str, object]


class UnfitRecord(ValueError):
    """Well-formed record that a run may leave out: `kind` is "too_long" (of `tokens`) or "invalid"."""

    def __init__(self, message: str, kind: str, tokens: int = 0) -> None:
        super().__init__(message)
        self.kind, self.tokens = kind, tokens


_PROMPT = ("prompt", "messages", "text")


@dataclass(frozen=True)
class Format:
    """How to read one source's texts.

    Attributes:
        columns: names of fields' columns, if they differ; if set, a row may have other columns, too.
        system: the system text of conversations without one.
        mask_history: only a conversation's last answer has loss.
        convert: another framework's record to this source's fields and other columns.
    """

    tokenizer: Tokenizer
    columns: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    mask_history: bool = False
    convert: Callable[[Row], tuple[Fields, Fields]] | None = None
    user_fields: tuple[Field, ...] = ()

    def fields(self, row: Row, source: str) -> tuple[Fields, Fields]:
        """Split a record of `source` into fields and other columns; ValueError as `pick`, or for another form."""
        row = without_user_fields(row, self.user_fields)
        return self.convert(row) if self.convert else pick(row, FIELDS[source], self.columns)


def without_user_fields(row: Row, user_fields: Sequence[Field]) -> Row:
    names = [field.name for field in user_fields]
    return {key: value for key, value in row.items() if key not in names} if names else row


def pick(row: Row, known: Sequence[str], columns: Mapping[str, str]) -> tuple[dict[str, object], dict[str, object]]:
    """Split a row into its fields and other columns; ValueError for a missing or an unknown column.

    >>> pick({"ask": "1+1=", "meta": {"key": "2"}, "id": 7}, ["prompt", "answer"], {"prompt": "ask", "answer": "meta.key"})
    ({'prompt': '1+1=', 'answer': '2'}, {'meta': {'key': '2'}, 'id': 7})
    """
    if not columns:
        for key in row:
            if key not in known:
                meant = closest(key, row.keys() & {*known}, cutoff=0.8)  # a slip, not another word
                near = nearest(key, [meant] if meant else [name for name in known if name not in row] or known)
                if not near.startswith("did"):
                    near = f"valid: {', '.join(known)}"
                raise ValueError(
                    f"unknown field {key!r}; {near}. The record has {', '.join(row)}: data.columns gives fields other names, "
                    "data.form names another framework's form"
                )
        return dict(row), {}
    fields = {name: _value(row, name, columns[name]) for name in known if name in columns}
    used = {*columns, *columns.values()}
    fields |= {name: row[name] for name in _needed(known, fields) if name in row and name not in used}
    used_columns = {*columns.values(), *fields}
    return fields, {key: value for key, value in row.items() if key not in used_columns}


def unread(row: Row, known: Sequence[str], columns: Mapping[str, str]) -> list[str]:
    """List a row's columns that `pick` does not read; ValueError for a misspelled name of a missing field.

    >>> unread({"ask": "1+1=", "answer": "2", "id": 7}, ["prompt", "answer"], {"prompt": "ask"})
    ['id']
    """
    named = {column if column in row else column.partition(".")[0] for column in columns.values()}
    read = [name for name in _needed(known, columns) if name not in columns]
    others = [key for key in row if key not in named and key not in read]
    for name in read:
        near = None if name in row else closest(name, others, cutoff=0.8)
        if near not in (None, f"{name}s"):
            raise ValueError(
                f"the column {near!r} is nearly {name!r}, which is missing. Rename it, or set data.columns.{name}: {near}"
            )
    return others


def _needed(known: Sequence[str], fields: Row) -> list[str]:
    """List the fields that are read by their own names even where `data.columns` names others."""
    prompt = () if not fields.keys().isdisjoint(_PROMPT) else ("prompt",)
    return [name for name in (*prompt, "answer", "chosen", "rejected") if name in known]


def field_of(fields: Row, key: str, row: Row | None = None) -> object:
    """Return a required field of `fields`; ValueError names the nearest column of `row` if it is missing."""
    if key not in fields:
        near = [name for name in row or () if nearest(key, [name]).startswith("did")]
        raise ValueError(
            f"the field {key!r} is missing" + (f"; data.columns.{key}: {near[0]} names it" if near else "")
        )
    return fields[key]


def text_of(fields: Row, key: str, row: Row | None = None) -> str:
    """Return a text; ValueError if it is missing, empty or no text."""
    value = field_of(fields, key, row)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key!r} = {brief(value)} is not valid; a text that is not empty is needed")
    return value


def _value(row: Row, name: str, column: str) -> object:
    value: object = row
    for number, key in enumerate(column.split(".")):
        if number == 0 and column in row:  # a column may have dots in its own name
            return row[column]
        if not isinstance(value, Mapping) or key not in value:
            near = nearest(key, map(str, value)) if isinstance(value, Mapping) else f"it lies in {brief(value)}"
            raise ValueError(f"the column {column!r} (data.columns: {name}) is missing; {near}")
        value = value[key]
    return value


# values of the user's own fields: of the sequence, or of each token
UserValues = tuple[float | tuple[float, ...], ...]


def read_user_values(row: Row, fields: Sequence[Field], count: int, of: str, need: str = "one for each") -> UserValues:
    """Read the user's own `fields` of a row, in order: a number of the sequence, or a list of `count`.

    `of` (the items that `count` counts) and `need` (the expected values) are for messages. ValueError for a value that
    is missing, no finite number or integer, or no 0 or 1 of a mask, and for a list of another length.
    """
    values: list[float | tuple[float, ...]] = []
    for declared in fields:
        name, integer = declared.name, declared.dtype == "integer"
        if name not in row:
            raise ValueError(f"the field {name!r} is missing; the loss declares it")
        value = _as_numbers(row[name], declared)
        if declared.per == "sequence":
            numbers: Sequence[float] = [checked_number(value, name, integer)]
        else:
            numbers = numbers_of({name: value}, name, integer)
            if len(numbers) != count:
                raise ValueError(f"{name!r} has {len(numbers)} values for {count} {of}; {need} is needed")
        if declared.dtype == "mask" and not {*numbers} <= {0, 1}:
            raise ValueError(f"{name!r} = {brief(value)} is not valid; a mask is 0 or 1")
        values.append(numbers[0] if declared.per == "sequence" else tuple(numbers))
    return tuple(values)


def answer_values(row: Row, fields: Sequence[Field], target: Target, of: str = "learned answers") -> UserValues:
    """Read the user's fields of an answer, as `read_user_values`; a token takes the number of its turn.

    The number of a token's field holds for every turn, a list has one for each. Tokens that are not learned take 0.

    >>> answer_values({"x": [0.5, 2]}, [Field("x")], Target((7, 8, 9, 9), (1, 0, 1, 1)))
    ((0.5, 0, 2, 2),)
    """
    if not fields:
        return ()
    turns, last, before = list[int](), -1, 0
    for learned in target.mask or (1,) * len(target.tokens):
        last += int(learned and not before)
        turns.append(last if learned else -1)
        before = learned
    of_all = [
        declared.name
        for declared in fields
        if declared.per == "token" and not isinstance(row.get(declared.name, []), list)
    ]
    repeated = {**row, **{name: [row[name]] * (last + 1) for name in of_all}}
    need = "a number for all or one for each (data.rollouts alone give single tokens their values)"
    return tuple(
        tuple(value[turn] if turn >= 0 else 0 for turn in turns) if isinstance(value, tuple) else value
        for value in read_user_values(repeated, fields, last + 1, of, need)
    )


_SIDES = ("chosen", "rejected")


def side_of(row: Row, fields: Sequence[Field], side: str) -> Row:
    """Return a pair's row with one side's values of the user's own fields; ValueError if a side has none.

    >>> side_of({"x": [0.5, 2]}, [Field("x")], "rejected"), side_of({"x": 1}, [Field("x")], "rejected")
    ({'x': 2}, {'x': 1})
    """
    values = dict(row)
    for name in [declared.name for declared in fields if declared.name in row]:
        value = row[name]
        of_sides = dict(zip(_SIDES, value, strict=False)) if isinstance(value, list) else value
        if isinstance(of_sides, Mapping):
            if set(of_sides) != {*_SIDES} or None in of_sides.values() or len(value) != 2:  # type: ignore[arg-type]
                raise ValueError(
                    f"{name!r} = {brief(value)} is not valid; {{chosen: ..., rejected: ...}}, a list of these two, or a number "
                    "for both is needed"
                )
            values[name] = of_sides[side]
    return values


def _as_numbers(value: object, declared: Field) -> object:
    """Convert true and false of a label or a mask to 1 and 0."""
    if declared.dtype not in ("label", "mask"):
        return value
    if isinstance(value, list):
        return [_as_numbers(item, declared) for item in value]
    return int(value) if isinstance(value, bool) else value


def numbers_of(row: Row, key: str, integer: bool = False) -> Sequence[float]:
    """Read a list of finite numbers; ValueError names the first other value."""
    items = field_of(row, key)
    if not isinstance(items, list):
        raise ValueError(f"{key!r} = {brief(items)} is not valid; a list is needed")
    # a row has thousands: test one by one only to name a wrong one
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
