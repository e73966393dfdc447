"""The sources of a run's data: their files, found by path or pattern, their order, and their part of a checkpoint."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.training.config.data import DataConfig, DatasetSource
from parallel_rl.training.data.examples import Answer, Example, Pair, Prompt, Rollout
from parallel_rl.training.data.parsers import Solution
from parallel_rl.training.data.records.files import DataFile, JsonlFile, ParquetFile, size_of
from parallel_rl.training.data.records.hugging_face import HuggingFaceFile
from parallel_rl.training.data.records.mapped import MappedFile, map_function
from parallel_rl.training.data.records.source import Records

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


RecordT = TypeVar("RecordT", Prompt, Example, Pair, Answer, Solution, Rollout)
Files = Mapping[str, tuple[DataFile, ...]]

SOURCES = ("held_out", "train", "examples", "pairs", "answers", "solutions", "rollouts")


@dataclass(frozen=True)
class Datasets:
    """The sources that the config names; the others are empty.

    Attributes:
        map: the function of `data.map` and a hash of its source; empty without one.
        longest: tokens of the longest sequence that a run can make of the checked records.
        limit: the most tokens of a sequence.
        checked: the checked fraction of each source.
        notes: lines about a source: form of its records, dropped and cut records, labels of answers.
    """

    train: Records[Prompt] = field(default_factory=Records)
    held_out: Records[Prompt] = field(default_factory=Records)
    examples: Records[Example] = field(default_factory=Records)
    pairs: Records[Pair] = field(default_factory=Records)
    answers: Records[Answer] = field(default_factory=Records)
    solutions: Records[Solution] = field(default_factory=Records)
    rollouts: Records[Rollout] = field(default_factory=Records)
    seed: int = 0
    map: str = ""
    longest: int = 0
    limit: int = 0
    checked: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def sources(self) -> Iterator[tuple[str, Records]]:
        """Iterate over the names and records of sources that are not empty."""
        for name in SOURCES:
            records: Records = getattr(self, name)
            if len(records):
                yield name, records

    def read(self, records: Records[RecordT], indices: Sequence[int]) -> list[RecordT]:
        """Read records of a shuffled source by indices over all passes; ValueErrors are on all ranks."""
        return raise_on_all_ranks(lambda: records.stream(indices, self.seed))

    def metadata(self) -> dict[str, str]:
        """Return the fingerprints of all sources and the seed of their order, for a checkpoint."""
        return {
            "data_seed": str(self.seed),
            **({"data_map": self.map} if self.map else {}),
            **{f"data_{name}": records.fingerprint for name, records in self.sources()},
        }

    def check_metadata(self, metadata: Mapping[str, object], where: object) -> None:
        """Raise ValueError for a checkpoint with another seed, source or fingerprint; names it."""
        mine, then = self.metadata(), f"when {where} was written: the run cannot resume at the next record"
        otherwise = "choose another run.dir, or set run.resume = 'never'"
        if (seed := metadata.get("data_seed")) != mine["data_seed"]:
            raise ValueError(f"run.seed = {self.seed} was {seed} {then} of that order. Restore it, {otherwise}")
        if (before := str(metadata.get("data_map", ""))) != self.map:
            raise ValueError(
                f"data.map (its name, and a hash of its module's source) is {self.map or 'not set'} and was "
                f"{before or 'not set'} {then}. Restore it, {otherwise}"
            )
        for name in (f"data_{source}" for source in SOURCES):
            key = f"data.{name.removeprefix('data_')}"
            if name in mine and name in metadata and mine[name] != metadata[name]:
                raise ValueError(
                    f"{key} had another content or order, or another data.buffer_megabytes, {then}. Restore it, {otherwise}"
                )
            # an evaluation may be added or removed: it does not change the order
            if name != "data_held_out" and (name in mine) != (name in metadata):
                there, here = ("left out", "given") if name in mine else ("given", "left out")
                raise ValueError(f"{key} is {here} and was {there} {then}. Restore it, {otherwise}")

    def describe_next(self, taken: Mapping[str, int]) -> str:
        """Describe the next record of each source, after `taken` of them."""
        parts = []
        for name, number in taken.items():
            turn, place = divmod(number, len(getattr(self, name)))
            parts.append(f"; data.{name} continues with record {place + 1:,} of pass {turn + 1:,}")
        return "".join(parts)

    def describe(self) -> list[str]:
        lines = []
        for name, records in self.sources():
            part = self.checked.get(name, 1.0)
            rest = "" if part == 1 else f"; {part:.1%} of it checked, the rest when it is read"
            files = f"{len(records.files):,} file{'s' * (len(records.files) > 1)}"
            lines.append(f"data.{name}: {len(records):,} records in {files}, {records.bytes / 1e6:,.1f} MB{rest}")
            lines += [f"data.{name}: {note}" for note in self.notes.get(name, ())]
        return lines


def find_data(config: DataConfig) -> Files:
    """Return the files that the config names, by source; ValueError as in `find_files`."""
    named = {name: getattr(config, name) for name in SOURCES}
    files = {name: find_files(value, f"data.{name}") for name, value in named.items() if value is not None}
    if config.map is None:
        return files
    name, function = config.map, map_function(config.map)
    return {source: tuple(MappedFile(file, function, name) for file in group) for source, group in files.items()}


def check_cut(records: Records[Rollout], place: int, count: int) -> None:
    """Raise ValueError if a step of `count` recorded sequences from `place` starts within a group."""
    group = records[place].group
    if place and records[place - 1].group == group:
        raise ValueError(
            f"data.rollouts: group {group} lies in two steps of rl.prompts × group_size = {count} sequences (at sequence "
            f"{place + 1}, {records.name_of(place)}); a group must be whole in its step"
        )
