"""Blocks of 512 bytes, so that a small file has many, and the records of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from unittest import mock

from parallel_rl.training.data.datasets import find_files
from parallel_rl.training.data.records import files as index
from parallel_rl.training.data.records.source import Records, RecordT, index_of

# around a test or the work of a rank: a rank of the warm pool keeps what it sets
small_blocks = mock.patch.object(index, "LEAST_STRETCH", 512)


def open_records(
    patterns: str | Sequence[str], name: str, parse: Callable[[Mapping[str, object]], RecordT], window: int = 1 << 26
) -> Records[RecordT]:
    files = find_files(patterns, name)
    return Records(files, index_of(files, name), parse, window)
