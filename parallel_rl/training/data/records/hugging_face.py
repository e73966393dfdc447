"""Data sets of the library `datasets`, read by index from memory-mapped Arrow; none with a loading script."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import torch.distributed as dist

from parallel_rl.agreement import gather_results
from parallel_rl.groups import group_rank
from parallel_rl.training.config.data import DatasetSource
from parallel_rl.training.data.records.files import Entries, Table, entries

if TYPE_CHECKING:
    import datasets
    import pyarrow

ROWS = 1024  # of a block
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_BUILDERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


@dataclass(frozen=True)
class HuggingFaceFile:
    """One split of a data set; one record a row."""

    source: DatasetSource
    key: str = field(compare=False)
    word = "row"

    @property
    def path(self) -> Path:
        parts = (self.source.name, self.source.split)
        return Path(f"{self.source.dataset} ({', '.join(part for part in parts if part)})")

    @property
    def size(self) -> int:
        return int(self._dataset.data.nbytes)

    @cached_property
    def _dataset(self) -> datasets.Dataset:
        return _loaded(self.source, self.key).with_format("arrow")

    def open(self) -> None:
        """Load the data set, from the hub or the cache; ValueError if it is missing or would run code."""
        assert self._dataset is not None

    def units(self, step: int) -> int:
        return -(-len(self._dataset) // ROWS)

    def index(self, number: int, first: int, last: int, step: int) -> Entries:
        rows = []
        for block in range(first, last):
            table = self._rows(block * ROWS)
            rows.append((number, block * ROWS, table.nbytes, len(table), _checksum(table)))
        return entries(rows)

    def read(self, start: int, size: int, crc: int) -> Table:
        """Read the block that begins with row `start`; ValueError if the data set has changed."""
        table = self._rows(start)
        if _checksum(table) != crc:
            raise ValueError(f"{self.path} has changed since the run began, from row {start + 1} on. Start over")
        return Table(table)

    def _rows(self, start: int) -> pyarrow.Table:
        """Return a block's rows, in one chunk."""
        arrow: pyarrow.Table = self._dataset[start : start + ROWS]
        return arrow.combine_chunks()


def open_in_turn(files: Sequence[object]) -> None:
    """Load a source's data sets: first rank 0, then the first rank of each node, then the others.

    So ranks that share a cache do not prepare the same data twice. Every rank calls it; errors are on all.
    """
    inner = (getattr(file, "file", file) for file in files)  # of one that is mapped
    sets = [file for file in inner if isinstance(file, HuggingFaceFile)]
    if not sets:
        return
    rank, local = group_rank(dist.group.WORLD), int(os.environ.get("LOCAL_RANK", "0"))
    mine = 0 if rank == 0 else 1 if local == 0 else 2

    def load(turn: int) -> Callable[[], None]:
        def open_mine() -> None:
            if turn == mine:
                for file in sets:
                    file.open()

        return open_mine

    for turn in range(3):
        gather_results(load(turn))


def _loaded(source: DatasetSource, key: str) -> datasets.Dataset:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"{key} is read with the library datasets, which is not installed: pip install datasets")
    import datasets

    path = Path(source.dataset)
    if path.exists():
        scripts = [path] if path.suffix == ".py" else [*path.glob("*.py")] if path.is_dir() else []
        if scripts:
            raise ValueError(
                f"{key}: {scripts[0]} is a loading script, which would run code of its own; write the records as Parquet or "
                "JSONL, or with save_to_disk, and name these"
            )
    try:
        loaded = _load(source, path)
    except Exception as error:  # of the library's own many kinds
        lines = str(error).splitlines()
        raise ValueError(
            f"{key}: {source.dataset!r} cannot be loaded: {lines[0] if lines else type(error).__name__}"
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            raise ValueError(f"{key}: {source.dataset!r} has no split {source.split!r}; it has {', '.join(loaded)}")
        loaded = loaded[source.split]
    elif source.split != "train" and (path / "state.json").is_file():
        raise ValueError(
            f"{key}: {source.dataset!r} is one saved split, so split = {source.split!r} has no effect; leave it out"
        )
    return loaded


def _load(source: DatasetSource, path: Path) -> datasets.Dataset | datasets.DatasetDict:
    import datasets

    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(path))
    if path.is_file():
        suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
        builder = _BUILDERS.get(suffixes[-1] if suffixes else "")
        if builder is None:
            raise ValueError(f"the kind of {path.name} is unknown; {', '.join(_BUILDERS)} are known, also compressed")
        options: dict[str, object] = {}
        if builder == "csv":  # text as it stands: the library would read 08 as 8, and NA as nothing
            import pandas

            separator = "\t" if suffixes[-1] == ".tsv" else ","
            columns = pandas.read_csv(path, sep=separator, nrows=0).columns
            texts = datasets.Features({column: datasets.Value("string") for column in columns})
            options = {"sep": separator, "features": texts, "keep_default_na": False}
        files = {source.split: str(path)}
        return datasets.load_dataset(builder, data_files=files, split=source.split, **options)  # nosec B615 # a local file
    return datasets.load_dataset(source.dataset, source.name, split=source.split, revision=source.revision)


def _checksum(table: pyarrow.Table) -> int:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    plain = table.replace_schema_metadata(None)
    with pyarrow.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain)
    return crc32(sink.getvalue())
