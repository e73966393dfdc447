"""The index of a source: one entry a block, a few hundred thousand entries at most."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
