"""Sharded state in a folder through megatron's dist_checkpointing, whose pickles are checked before any is loaded."""

from __future__ import annotations

import inspect
import io
import json
import pickle
import queue
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from parallel_rl.agreement import describe, raise_on_all_ranks
from parallel_rl.groups import sum_over_ranks
from parallel_rl.training.checkpointing.storage import free_bytes, in_words

_INDEX = ".metadata"
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_PLANS = "torch.distributed.checkpoint"
_NAMES = {  # classes that only hold data
    f"{_PLANS}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_PLANS}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_PLANS}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}


class _Place(NamedTuple):
    name: str
    file: str
    offset: int
    length: int


def check_pickles(path: Path) -> None:
    """Check every pickle of a checkpoint (index, common part, objects) without running any.

    Only tensors, numbers, text, their containers, and torch's index classes pass: checksums do not stop a person who
    writes the folder. ValueError for a pickle that names anything else, or an index that points outside the folder.
    """
    try:
        settings = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.absolute()} is not loaded: metadata.json cannot be read: {error}") from None
    if settings != BACKENDS:
        raise ValueError(f"{path.absolute()} is not loaded: metadata.json is {settings!r}; {BACKENDS!r} is right")
    objects = _objects(path)
    _check(path, "common.pt", (path / "common.pt").read_bytes())
    for place in objects:
        with (path / place.file).open("rb") as file:
            file.seek(place.offset)
            _check(path, f"{place.name!r} in {place.file}", file.read(place.length))


def _objects(path: Path) -> list[_Place]:
    try:
        with (path / _INDEX).open("rb") as file:
            index = _Index(file).load()
        assert isinstance(index, Metadata), f"it is a {type(index).__name__}"
        sizes = {file.name: file.stat().st_size for file in path.iterdir()}
        places = []
        for entry, where in index.storage_data.items():
            name, start, end = where.relative_path, where.offset, where.offset + where.length
            assert name in sizes and not where.transform_descriptors, f"{entry.fqn} lies in {name!r}"
            assert 0 <= start <= end <= sizes[name], f"{entry.fqn} lies at {start}:{end} of {name!r}"
            if isinstance(index.state_dict_metadata[entry.fqn], BytesStorageMetadata):
                places.append(_Place(entry.fqn, name, start, end - start))
        return places
    except Exception as error:  # a pickle may raise anything; nothing of it has run
        raise ValueError(f"{path.absolute()} is not loaded: {_INDEX}: {error}") from None


def _check(path: Path, what: str, pickled: bytes) -> None:
    try:
        with torch.serialization.safe_globals([io.BytesIO]):  # Transformer Engine's state
            torch.load(io.BytesIO(pickled), map_location="meta", weights_only=True)
    except Exception as error:
        cause = str(error).partition("\n")[0] if "GLOBAL" not in str(error) else _named(str(error))
        raise ValueError(f"{path.absolute()} is not loaded: {what}: {cause}") from None


def _named(text: str) -> str:
    """Return the line of torch's message that names the refused class."""
    return next(line.strip() for line in text.splitlines() if "GLOBAL" in line)


class _Index(pickle.Unpickler):
    """Unpickler of an index that refuses every name that torch does not write there."""

    def find_class(self, module: str, name: str) -> object:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index; it could run code")


State = dict[str, Any]


def save_sharded(state: State, folder: Path, what: str) -> None:
    """Write the ranks' state into an empty folder; RuntimeError on all ranks names the failed ones.

    Megatron's save lets ranks wait in a collective while the first one writes, and forks writers that outlive a killed rank.
    Here every stage ends with a status from each rank, and each rank writes in its own process.
    """
    filesystem_async._results_queue = queue.Queue()  # else megatron starts a process for it
    strategy = _ShardedOnEveryRank("torch_dist", 1)
    sharded, common = save_preprocess(state)
    first = dist.get_rank() == 0
    # separate, as before 0.19 and still readable: one format for all versions
    write = partial(_write_to, folder, lambda: torch.save(common, folder / "common.pt"))
    raise_on_all_ranks(lambda: write() if first else None, what=what)
    # newer versions use another package's writers by default
    which = ["mcore"] if "async_strategy" in inspect.signature(strategy.async_save).parameters else []
    request = strategy.async_save(sharded, folder, *which)
    raise_on_all_ranks(lambda: _write_to(folder, request.async_fn), what=what)
    failures: list[Exception] = []
    request.finalize_fns[0](failures)
    raise_on_all_ranks(lambda: _raise(failures), what=what)
    settings = json.dumps(BACKENDS)
    raise_on_all_ranks(lambda: (folder / "metadata.json").write_text(settings) if first else None, what=what)


def load_sharded(wanted: State, folder: Path, what: str) -> State:
    """Read the entries of `wanted` from a folder of any layout; RuntimeError on all ranks names failures."""
    # read without collectives first, so that all ranks learn of a failure
    raise_on_all_ranks(lambda: dist_checkpointing.load_common_state_dict(str(folder)), what=what)
    with warnings.catch_warnings():
        # Megatron's own call causes it; a user cannot change it
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        return raise_on_all_ranks(lambda: dist_checkpointing.load(wanted, str(folder)), what=what)


def bytes_of(state: State, device: torch.device) -> int:
    """Count the bytes of a sharded state in a checkpoint, equal on every rank; one all-reduce."""
    mine = sum(
        value.data.numel() * value.data.element_size()
        for value in nested_values(state)
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and is_main_replica(value.replica_id)
    )
    return sum_over_ranks(mine, dist.group.WORLD, device)


def _write_to(folder: Path, write: Callable[[], object]) -> None:
    """Call `write`, and add the free space to its error: torch reports a full disk as "iostream error"."""
    try:
        write()
    except RuntimeError as error:
        raise RuntimeError(f"{describe(error)} ({_room(folder)})") from error


def _room(folder: Path) -> str:
    room = f"{in_words(free_bytes(folder))} are free"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return room
    except OSError as error:
        return f"{room}; another file: {error.strerror}"


class _ShardedOnEveryRank(TorchDistSaveShardedStrategy):
    """Writer in its own process; the first rank reports a failed index while no other rank waits."""

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, result: Any, *which: str) -> Any:
        request, finish = super()._get_save_and_finalize_callbacks(writer, result, *which), writer.finish

        def finalize(failures: list[Exception]) -> None:
            def kept(*arguments: Any) -> None:
                try:
                    finish(*arguments)
                except Exception as error:
                    failures.append(error)

            writer.finish = kept
            request.finalize_fns[0]()

        return request._replace(async_fn=lambda: _write(writer, request.preload_fn), finalize_fns=[finalize])


def _write(writer: FileSystemWriterAsync, preload: Callable[[], list[Any]] | None) -> None:
    if preload is None:
        return
    buckets, transforms = preload(), [writer.transforms] if hasattr(writer, "transforms") else []

    def write(index: int) -> object:
        answers: queue.Queue[tuple[int, object]] = queue.Queue()
        turn: queue.Queue[int] = queue.Queue()
        turn.put(index)
        writer.write_preloaded_data(transforms, index, buckets[index], answers, turn, True)
        return answers.get_nowait()[1]

    with ThreadPoolExecutor(len(buckets)) as threads:
        results = list(threads.map(write, range(len(buckets))))
    _raise([result for result in results if isinstance(result, Exception)])
    writer.results_queue.put(dict(enumerate(results)))


def _raise(failures: Sequence[Exception]) -> None:
    for failure in failures:
        raise failure
