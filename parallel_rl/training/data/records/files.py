"""Files of records in blocks: their index, lines of JSONL and row groups of Parquet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from parallel_rl.config.json_text import parse_json

if TYPE_CHECKING:
    import pyarrow

# A block is read at once: the lines that begin within a stretch of a JSONL file, or a row group of a Parquet file.
#   file: its number in the source. start: its first byte, or the row group's number. size: bytes (Parquet: uncompressed).
#   count: records. crc: of the lines, or of the Parquet file's footer.
ENTRY = np.dtype([("file", "<i4"), ("start", "<i8"), ("size", "<i8"), ("count", "<i8"), ("crc", "<u4")])
Entries = NDArray[np.void]

LEAST_STRETCH = 1 << 16
MOST_BLOCKS = 1 << 18


Row = Mapping[str, object]


class Block(Protocol):
    """The rows of one block."""

    def row(self, index: int) -> Row: ...

    def rows(self, first: int, last: int) -> Iterator[Row]: ...

    def __len__(self) -> int: ...


class DataFile(Protocol):
    """A file, or a split of a data set, that is read a block at a time."""

    @property
    def path(self) -> Path:
        """Return the path or the name, for messages."""

    @property
    def size(self) -> int: ...

    @property
    def word(self) -> str:
        """Return the name of a record in messages: line, row."""

    def units(self, step: int) -> int:
        """Count the parts that are indexed one by one."""

    def index(self, number: int, first: int, last: int, step: int) -> Entries:
        """Make the entries of parts `first` up to `last`; `number` is the file's in its source."""

    def read(self, start: int, size: int, crc: int) -> Block: ...


def stretch(total: int) -> int:
    """Return the bytes of JSONL a block for a source of `total` bytes; large enough for a small index."""
    size = LEAST_STRETCH
    while total > size * MOST_BLOCKS:
        size *= 2
    return size


def entries(rows: Sequence[tuple[int, int, int, int, int]]) -> Entries:
    """Build entries [blocks] from (file, start, size, count, crc)."""
    return np.array(list(rows), dtype=ENTRY)


def fingerprint(sizes: Sequence[int], index: Entries, window: int) -> str:
    """Return a hash of files' sizes, content and order; their names do not matter."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.array([window, *sizes], dtype="<i8").tobytes())
    digest.update(index.tobytes())
    return digest.hexdigest()


_TAIL = 1 << 16


class Lines:
    """The lines of one block; each is parsed when read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        breaks = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")).astype(np.int32) + 1
        last = [] if len(breaks) and breaks[-1] == len(data) else [len(data)]
        self._bounds = np.concatenate([[0], breaks, last]).astype(np.int32)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def row(self, index: int) -> Row:
        """Return line `index` of the block; ValueError if it is no JSON object."""
        first, last = self._bounds[index : index + 2].tolist()
        return _object(self._data[first:last])

    def rows(self, first: int, last: int) -> Iterator[Row]:
        return (self.row(index) for index in range(first, last))


@dataclass(frozen=True)
class JsonlFile:
    """One JSON object a line; `size` ends after the last line that is not blank, see `size_of`."""

    path: Path
    size: int
    word = "line"

    def units(self, step: int) -> int:
        return -(-self.size // step)

    def index(self, number: int, first: int, last: int, step: int) -> Entries:
        """Make entries of blocks `first` up to `last` by the lines' starts; ValueError if the file changes."""
        blocks: list[tuple[int, int, int, int, int]] = []
        begun: tuple[int, int, int] | None = None  # start, count and checksum so far of the open block
        with self.path.open("rb") as file:
            file.seek(max(first * step - 1, 0))
            at_start = first == 0 or file.read(1) == b"\n"
            for block in range(first, self.units(step)):
                chunk = self._chunk(file, block, step)
                inside = len(chunk) - 1  # a line that begins after the last byte is the next block's
                begin = 0 if at_start else chunk.find(b"\n", 0, inside) + 1
                starts = at_start or begin > 0
                if begun is not None:
                    start, count, crc = begun
                    crc = crc32(chunk[:begin] if starts else chunk, crc)
                    begun = (start, count, crc)
                    if starts:
                        blocks.append((number, start, block * step + begin - start, count, crc))
                        begun = None
                if block >= last and begun is None:
                    break
                if starts and block < last:
                    count = int(at_start) + chunk.count(b"\n", 0, inside)
                    begun = block * step + begin, count, crc32(chunk[begin:])
                at_start = chunk[-1:] == b"\n"
        if begun is not None:
            blocks.append((number, begun[0], self.size - begun[0], begun[1], begun[2]))
        return entries(blocks)

    def read(self, start: int, size: int, crc: int) -> Lines:
        """Read the block of an entry; ValueError if the file has changed since it was indexed."""
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read(size)
        if crc32(data) != crc:
            raise ValueError(
                f"{self.path} has changed since the run began: its bytes {start} to {start + size} differ. Restore it, or "
                "start over"
            )
        return Lines(data)

    def _chunk(self, file: BinaryIO, block: int, step: int) -> bytes:
        expected = min(step, self.size - block * step)
        chunk = file.read(expected)
        if len(chunk) != expected:
            raise ValueError(
                f"{self.path} was truncated while it was read: it had {self.size} bytes; restore it, or start over"
            )
        return chunk


def size_of(path: Path) -> int:
    """Return the bytes of a file without the blank lines at its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while size:
            start = max(size - _TAIL, 0)
            file.seek(start)
            tail = file.read(size - start)
            if text := tail.rstrip():
                newline = tail.find(b"\n", len(text))
                return size if newline < 0 else start + newline + 1
            size = start
    return 0


def _object(line: bytes) -> Row:
    try:
        text = line.decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 ({error.reason} at byte {error.start}): {line.strip()[:80]!r}") from None
    if not text.strip():
        raise ValueError("the line is empty; a JSON object is needed")
    try:
        row = parse_json(text.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg} at column {error.colno}): {text.strip()[:80]!r}") from None
    except ValueError as error:
        raise ValueError(f"{error}: {text.strip()[:80]!r}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed, got {text.strip()[:80]!r}")
    return row


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
                f"{self.path} has changed since the run began: its footer differs. Restore it, or start over"
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
