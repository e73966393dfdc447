"""Parquet in blocks of row groups; pyarrow is imported when the first file is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from parallel_rl.training.data.records.index import Entries, entries

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, object]

_MAGIC = b"PAR1"


class Table:
    """The rows of one row group, in columns; a null is a missing field."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Row:
        return next(self.rows(index, index + 1))

    def rows(self, first: int, last: int) -> Iterator[Row]:
        for row in self._table.slice(first, last - first).to_pylist():
            yield {key: value for key, value in row.items() if value is not None}


@dataclass(frozen=True)
class ParquetFile:
    """One record a row."""

    path: Path
    size: int
    word = "row"

    def units(self, step: int) -> int:
        """Return 1: the footer is read as a whole."""
        return 1

    def index(self, number: int, first: int, last: int, step: int) -> Entries:
        """Make an entry for each row group with rows; ValueError for another or truncated file."""
        import pyarrow
        import pyarrow.parquet as parquet

        crc = self._footer()
        try:
            metadata = parquet.read_metadata(self.path)
        except (ValueError, OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{self.path} cannot be read as Parquet: {error}") from None
        names = metadata.schema.to_arrow_schema().names
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{self.path}: the column {twice[0]!r} occurs twice")
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        return entries(
            [
                (number, place, group.total_byte_size, group.num_rows, crc)
                for place, group in enumerate(groups)
                if group.num_rows
            ]
        )

    def read(self, start: int, size: int, crc: int) -> Table:
        """Read row group `start`; ValueError if the file has changed or its pages are damaged."""
        import pyarrow
        import pyarrow.parquet as parquet

        if self._footer() != crc:
            raise ValueError(
                f"{self.path} has changed since the run began: its footer is another. Restore it, or start over"
            )
        try:
            with parquet.ParquetFile(self.path, pre_buffer=False) as file:
                return Table(file.read_row_group(start, use_threads=False).combine_chunks())
        except (ValueError, OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{self.path}, row group {start}: {error}") from None

    def _footer(self) -> int:
        """Return the checksum of the footer, which locates each column of each row group."""
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 8, 0))
            tail = file.read(8)
            length = int.from_bytes(tail[:4], "little")
            if len(tail) < 8 or tail[4:] != _MAGIC or length > size - 8:
                raise ValueError(f"{self.path} is not a whole Parquet file: its end is missing")
            file.seek(size - 8 - length)
            return crc32(file.read(length), size & 0xFFFFFFFF)
