"""Map each record by the user's function before it is parsed: `data.map`."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from parallel_rl.config.json_text import brief
from parallel_rl.training.data.records.files import Block, DataFile, Entries, Row

MapFunction = Callable[[Row], object]


class MappedRows:
    """The mapped records of a block; reading a row that the function refused raises."""

    def __init__(self, records: list[Row | ValueError]) -> None:
        self._records = records

    def row(self, index: int) -> Row:
        record = self._records[index]
        if isinstance(record, ValueError):
            raise record
        return record

    def rows(self, first: int, last: int) -> Iterator[Row]:
        return (self.row(index) for index in range(first, last))

    def __len__(self) -> int:
        return len(self._records)


@dataclass(frozen=True)
class MappedFile:
    """File whose rows `function` maps to a record, a list of records, or None to leave the row out."""

    file: DataFile
    function: MapFunction
    name: str
    word = "mapped record"

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def size(self) -> int:
        return self.file.size

    def units(self, step: int) -> int:
        return self.file.units(step)

    def index(self, number: int, first: int, last: int, step: int) -> Entries:
        """Index the mapped records of each block; ValueError if two calls map its first row differently."""
        index = self.file.index(number, first, last, step).copy()
        for place, (_, start, size, _, crc) in enumerate(index.tolist()):
            rows = _rows_of(self.file.read(start, size, crc))
            row = rows[0] if rows else {}
            if isinstance(row, Mapping) and repr(self._call(row)) != repr(self._call(row)):
                raise ValueError(
                    f"{self.path}: data.map: {self.name} gives two different records for one row; it must be deterministic"
                )
            index["count"][place] = len(self._mapped(rows))
        return index

    def read(self, start: int, size: int, crc: int) -> MappedRows:
        return self._mapped(_rows_of(self.file.read(start, size, crc)))

    def _mapped(self, rows: list[Row | ValueError]) -> MappedRows:
        records: list[Row | ValueError] = []
        for row in rows:
            records += [row] if isinstance(row, ValueError) else self._call(row)
        return MappedRows(records)

    def _call(self, row: Row) -> list[Row | ValueError]:
        try:
            result = self.function(deepcopy(dict(row)))  # which the function may change
        except Exception as error:  # of the user's own code
            return [ValueError(f"data.map: {self.name} raised {type(error).__name__}: {error}")]
        records = [] if result is None else result if isinstance(result, list) else [result]
        return [
            record
            if isinstance(record, Mapping)
            else ValueError(
                f"data.map: {self.name} returned {brief(record)}, a {type(record).__name__}; a record (a mapping), a list of "
                "them, or None is needed"
            )
            for record in records
        ]


def _rows_of(block: Block) -> list[Row | ValueError]:
    """Parse the rows of a block; a malformed row is replaced by its error."""
    try:
        return [*block.rows(0, len(block))]
    except ValueError:
        return [_row_of(block, index) for index in range(len(block))]


def _row_of(block: Block, index: int) -> Row | ValueError:
    try:
        return block.row(index)
    except ValueError as error:
        return error


def map_function(name: str) -> MapFunction:
    """Find "module:function" in a module that `--import` names; ValueError if there is none."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"data.map = {name!r} is not valid; write module:function")
    if module not in sys.modules:
        raise ValueError(f"data.map = {name!r}: a config imports nothing; pass --import {module}")
    function = getattr(sys.modules[module], attribute, None)
    if not callable(function):
        raise ValueError(f"data.map = {name!r}: {module} has no function {attribute!r}")
    return function


def identity(name: str) -> str:
    """Return a map's name with a hash of its module's source; a run resumes only with the same one."""
    module = sys.modules[name.rpartition(":")[0]]
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        source = name
    return f"{name} {hashlib.blake2b(source.encode(), digest_size=8).hexdigest()}"
