"""Manifest of a checkpoint: progress, model, layout, and the checksum of each file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Any

import torch.distributed as dist

from parallel_rl.agreement import describe, gather_results
from parallel_rl.training.session import TrainProgress

MANIFEST = "manifest.json"
_FORMAT = 2
_KEYS = {"progress": "position", "values": "facts"}  # names in format 2
_CHUNK = 1 << 22
Value = float | int | str | bool | None


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files differ from what was written; the message names the file and the fault."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """Facts of a checkpoint besides its tensors.

    Attributes:
        values: numbers to continue with: fingerprints of the data, held-out rewards.
        model: settings that a run must share with it, by the names of the config.
        layout: tensor, context, pipeline and data sizes of the run that wrote it.
        parts: its contents: "model", "optimizer", "reference", ..., "controllers.<name>", "extra.<name>".
    """

    progress: TrainProgress
    values: Mapping[str, float | int | str]
    model: Mapping[str, Value]
    layout: Mapping[str, int]
    parts: tuple[str, ...]


@dataclass(frozen=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Metadata of a checkpoint, and the entry of each file by name."""

    metadata: CheckpointMetadata
    files: Mapping[str, FileEntry]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and sync `folder/manifest.json`."""
    record = {_KEYS.get(name, name): value for name, value in asdict(manifest.metadata).items()}
    content = {"format": _FORMAT, "record": record, "files": asdict(manifest)["files"]}
    body = json.dumps(content, sort_keys=True)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest; ValueError for no folder, or a manifest of another format.

    DamagedCheckpoint if it is not valid or does not list the folder's files.
    """
    if not path.is_dir():
        raise ValueError(f"{path.absolute()} is not a checkpoint: there is no such folder")
    try:
        outer = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        body: str = outer["body"]
        if hashlib.sha256(body.encode()).hexdigest() != outer["sha256"]:
            raise DamagedCheckpoint(f"{path.absolute()} is damaged: {MANIFEST} does not match its own checksum")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path.absolute()} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path.absolute()} is damaged: {MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{path.absolute()} is damaged: {MANIFEST} is cut off or garbled") from None
    try:
        content = json.loads(body)
        version = content["format"]
        manifest = _manifest(content) if version == _FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        cause = describe(error)
        raise DamagedCheckpoint(f"{path.absolute()} is damaged: {MANIFEST} has another shape: {cause}") from None
    if manifest is None:
        raise ValueError(
            f"{path.absolute()} has the format {version}; this version of parallel_rl reads format {_FORMAT}"
        )
    if unlisted := sorted(_names(path) - {*manifest.files, MANIFEST}):
        raise DamagedCheckpoint(f"{path.absolute()} is damaged: it holds {unlisted[0]}, which {MANIFEST} does not list")
    return manifest


def _manifest(content: dict[str, Any]) -> Manifest:
    record, files = content["record"], content["files"]
    place, values, model, layout, parts = (record[name] for name in ("position", "facts", "model", "layout", "parts"))
    _all_of(str, place["phase"], *place["taken"], *values, *model, *layout, *parts, *files)
    _all_of(
        int, place["step"], *place["taken"].values(), *layout.values(), *(entry["size"] for entry in files.values())
    )
    _all_of(float | int | str | None, *values.values(), *model.values())
    entries = {name: FileEntry(**entry) for name, entry in files.items()}
    if not entries:
        raise ValueError("it lists no file")
    for name in entries:
        if name != Path(name).name or name in (MANIFEST, ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in its folder")
    return Manifest(CheckpointMetadata(TrainProgress(**place), values, model, layout, tuple(parts)), entries)


def _all_of(kind: UnionType | type, *values: object) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is not of type {kind}")


def _names(path: Path) -> set[str]:
    return {entry.name for entry in os.scandir(path) if not entry.name.startswith(".nfs")}  # NFS's removed, open files


def checksum(path: Path, *, sync: bool = False) -> FileEntry:
    """Return a file's SHA-256; `sync` also syncs it to the disk. OSError if it cannot be read."""
    digest, size, chunk = hashlib.sha256(), 0, bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(chunk):
            digest.update(memoryview(chunk)[:count])
            size += count
    return FileEntry(size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def written_by(name: str, ranks: int) -> int:
    """Return the rank that wrote a file: megatron names shards by it, the first rank writes the rest."""
    stem = name.removeprefix("__").split("_")[0]
    return int(stem) % ranks if name.startswith("__") and stem.isdigit() else 0


def fault(path: Path, entry: FileEntry, *, contents: bool = True) -> str | None:
    """Return the fault of a file, or None; without `contents` only its size is checked."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{path.name} has {size} bytes, {entry.size} were written"
        if contents and checksum(path) != entry:
            return f"{path.name} does not match its checksum: its content has changed since it was written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None


def verify_checksums(path: Path, manifest: Manifest) -> None:
    """Verify a checkpoint's files, each rank a part; DamagedCheckpoint on all ranks names a fault."""
    mine = share(manifest.files, dist.get_rank(), dist.get_world_size())
    parts = gather_results(lambda: [damage for name in mine if (damage := fault(path / name, manifest.files[name]))])
    if everywhere := sorted(damage for part in parts for damage in part):
        more = f" (and {len(everywhere) - 1} more)" if len(everywhere) > 1 else ""
        raise DamagedCheckpoint(f"{path.absolute()} is damaged: {everywhere[0]}{more}")


def share(files: Mapping[str, FileEntry], rank: int, ranks: int) -> list[str]:
    """Choose the files that one of `ranks` ranks verifies, about as many bytes for each."""
    loads, mine = [0] * ranks, []
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += files[name].size + 1
        if lightest == rank:
            mine.append(name)
    return mine


def differing(saved: Mapping[str, Value], current: Mapping[str, Value], names: Iterable[str]) -> str | None:
    """Describe the first value in which a checkpoint and a run differ."""
    for name in names:
        if name in saved and saved[name] != current[name]:
            return f"{name} is {saved[name]!r} there and {current[name]!r} in this run"
    return None
