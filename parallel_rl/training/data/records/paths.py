"""Find files in a fixed order from paths or patterns."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from parallel_rl.training.config.data import DatasetSource
from parallel_rl.training.data.records.hugging_face import HuggingFaceFile
from parallel_rl.training.data.records.index import DataFile
from parallel_rl.training.data.records.jsonl import JsonlFile, size_of
from parallel_rl.training.data.records.parquet import ParquetFile

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_FILES = 1_000_000
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def find_files(patterns: str | Sequence[str] | DatasetSource, name: str) -> tuple[DataFile, ...]:
    """Return the files of `patterns`: by name within a pattern, in order over a list; or a data set.

    A pattern has *, ?, [...] and **, or braces: {a,b} and {000..127}, each of which must exist. `name` is the config's
    key. ValueError for a missing file, a pattern without a match, a file named twice or of an unknown kind.
    """
    if isinstance(patterns, DatasetSource):
        return (HuggingFaceFile(patterns, name),)
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if not listed:
        raise ValueError(f"{name} = [] names no file; leave it out, or give at least one")
    paths = [path for pattern in listed for path in _matches(pattern, name)]
    seen: set[Path] = set()
    for path in paths:
        real = path.resolve()
        if real in seen:
            raise ValueError(f"{name} names the file {path} twice; its records would be used twice in a pass")
        seen.add(real)
    return tuple(_open(path) for path in paths)


def braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern, {a,b}, {0..3} or {008..012}; ValueError for others and too many."""
    patterns = [pattern]
    while _BRACES.search(patterns[0]):  # all have the same braces
        patterns = [
            expanded for part in patterns for expanded in _first_brace(part, pattern, _MOST_FILES // len(patterns))
        ]
    return patterns


def _first_brace(part: str, pattern: str, most: int) -> list[str]:
    match = _BRACES.search(part)
    assert match is not None
    bounds = _RANGE.fullmatch(match[1])
    if bounds is None and "," not in match[1]:
        raise ValueError(f"the braces of {pattern!r} hold {match[1]!r}; write {{a,b}} or {{000..127}}")
    choices = match[1].split(",")
    if bounds is not None:
        first, last, width = int(bounds[1]), int(bounds[2]), len(bounds[1])
        if last < first:
            raise ValueError(
                f"the braces of {pattern!r} count from {first} down to {last}; write the lower number first"
            )
        choices = [] if last - first >= most else [f"{number:0{width}d}" for number in range(first, last + 1)]
    if not 0 < len(choices) <= most:
        raise ValueError(f"the braces of {pattern!r} name more than {_MOST_FILES:,} files")
    return [part[: match.start()] + choice + part[match.end() :] for choice in choices]


def _matches(pattern: str, name: str) -> list[Path]:
    if Path(pattern).is_file():  # whatever characters its name has
        return [Path(pattern)]
    matches = []
    for single in braces(pattern):
        path = Path(single)
        if path.is_dir():
            raise ValueError(f"{name}: {path.absolute()} is a folder; write {path}/*.jsonl or {path}/*.parquet")
        if path.is_file() or not glob.has_magic(single):
            if path.exists() and not path.is_file():
                raise ValueError(f"{name}: {path.absolute()} is not a file")
            if not path.is_file():
                raise ValueError(f"{name}: the data file {path.absolute()} does not exist")
            matches.append(path)
            continue
        paths = [Path(item) for item in sorted(glob.glob(single, recursive=True)) if Path(item).is_file()]
        if not paths:
            raise ValueError(f"{name}: no file matches {path.absolute()}")
        matches += paths
    return matches


def _open(path: Path) -> DataFile:
    if path.suffix in _COMPRESSED:
        raise ValueError(
            f"{path} is compressed, so that no line of it can be found; unpack it, or read it by {{dataset: {path}}}"
        )
    if path.suffix in (".csv", ".tsv", ".arrow") or (path.suffix == ".json" and _begins_array(path)):
        raise ValueError(f"{path} is not JSONL, one object a line, nor Parquet; read it by {{dataset: {path}}}")
    if path.suffix != ".parquet":
        return JsonlFile(path, size_of(path))
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path} is read with pyarrow, which is not installed: pip install pyarrow")
    return ParquetFile(path, path.stat().st_size)


def _begins_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
