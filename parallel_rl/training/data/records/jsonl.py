"""JSONL in blocks of whole lines, found by one pass over the bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import numpy as np

from parallel_rl.config.json_text import parse_json
from parallel_rl.training.data.records.index import Entries, entries

Row = Mapping[str, object]

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
                f"{self.path} has changed since the run began: the lines in its bytes {start} to {start + size} are others. "
                "Restore it, or start over"
            )
        return Lines(data)

    def _chunk(self, file: BinaryIO, block: int, step: int) -> bytes:
        expected = min(step, self.size - block * step)
        chunk = file.read(expected)
        if len(chunk) != expected:
            raise ValueError(f"{self.path} changes while it is read: it had {self.size} bytes and was cut")
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
