"""Functions for `data.map`, imported as by --import."""

from __future__ import annotations

from itertools import count

Row = dict[str, object]
_calls = count()


def questions(row: Row) -> Row | list[Row] | None:
    """One record for most, two for every 7th, none for every 5th."""
    number = int(str(row["n"]))
    record: Row = {"prompt": f"{row['question']}", "answer": f"{row['solution']}"}
    if number % 5 == 0:
        return None
    return [record, record] if number % 7 == 0 else record


same_questions = questions


def in_place(row: Row) -> Row:
    row["n"] = [row["n"]]
    row["n"].append(0)
    return row


def nothing_left(row: Row) -> None:
    """Leave every record out."""


def a_set(row: Row) -> object:
    return {"prompt"}


def a_text(row: Row) -> object:
    return ["prompt"]


def broken(row: Row) -> object:
    return row["missing"]


def changing(row: Row) -> object:
    return {"prompt": "1+1=", "answer": str(next(_calls))}
