"""The manifest of a checkpoint: its run's progress, the model it is of, and the checksum of each of its files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from parallel_rl.agreement import gather_results
from parallel_rl.training.progress import TrainProgress

MANIFEST = "manifest.json"
_FORMAT = 2
_KEYS = {"progress": "position", "values": "facts"}  # as format 2 has them
_CHUNK = 1 << 22
Value = float | int | str | bool | None


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are not what was written; the message names the file and the fault."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """Everything known of a checkpoint without its tensors.

    Attributes:
        progress: of its run.
        values: numbers that the run continues with: fingerprints of its data, held-out rewards.
        model: what a run must share with it, by the names of the config.
        layout: the sizes of the parallel dimensions that wrote it: tensor, context, pipeline, data.
        parts: what it holds: "model", "optimizer", "reference", ..., "controllers.<name>", "extra.<name>".
    """

    progress: TrainProgress
    values: Mapping[str, float | int | str]
    model: Mapping[str, Value]
    layout: Mapping[str, int]
    parts: tuple[str, ...]


@dataclass(frozen=True)
class FileEntry:
    """One file: its bytes, and their SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The metadata of a checkpoint, and each of its files by name."""

    metadata: CheckpointMetadata
    files: Mapping[str, FileEntry]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `folder/manifest.json` and has it on the disk when this returns."""
    record = {_KEYS.get(name, name): value for name, value in asdict(manifest.metadata).items()}
    content = {"format": _FORMAT, "record": record, "files": asdict(manifest)["files"]}
    body = json.dumps(content, sort_keys=True)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        DamagedCheckpoint: no manifest there, or one that is not what was written.
        ValueError: no folder there, or a manifest of another format.
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
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpoint(f"{path.absolute()} is damaged: {MANIFEST} is cut off or garbled") from None
    return _manifest(path, json.loads(body))


def _manifest(path: Path, content: dict[str, object]) -> Manifest:
    if content["format"] != _FORMAT:
        raise ValueError(
            f"{path.absolute()} has the format {content['format']}; this version of parallel_rl reads format {_FORMAT}"
        )
    record, files = content["record"], content["files"]
    assert isinstance(record, dict) and isinstance(files, dict)
    progress = TrainProgress(**record["position"])
    metadata = CheckpointMetadata(progress, record["facts"], record["model"], record["layout"], tuple(record["parts"]))
    return Manifest(metadata, {name: FileEntry(**entry) for name, entry in files.items()})


def checksum(path: Path, *, sync: bool = False) -> FileEntry:
    """Reads a file through; `sync`: has it on the disk when this returns.

    Raises:
        OSError: it cannot be read.
    """
    digest, size, chunk = hashlib.sha256(), 0, bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(chunk):
            digest.update(memoryview(chunk)[:count])
            size += count
    return FileEntry(size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def written_by(name: str, ranks: int) -> int:
    """The rank that wrote a file of a checkpoint: megatron names shards by it, the rest is the first one's."""
    stem = name.removeprefix("__").split("_")[0]
    return int(stem) % ranks if name.startswith("__") and stem.isdigit() else 0


def fault(path: Path, entry: FileEntry, *, contents: bool = True) -> str | None:
    """The fault of a file, or None; without `contents` only its size is checked, it is not read."""
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
    """Reads every file of a checkpoint, each rank its share.

    Raises:
        DamagedCheckpoint: names the first file that is not as it was written, and the fault; on all ranks.
    """
    mine = share(manifest.files, dist.get_rank(), dist.get_world_size())
    parts = gather_results(lambda: [damage for name in mine if (damage := fault(path / name, manifest.files[name]))])
    if everywhere := sorted(damage for part in parts for damage in part):
        more = f" (and {len(everywhere) - 1} more)" if len(everywhere) > 1 else ""
        raise DamagedCheckpoint(f"{path.absolute()} is damaged: {everywhere[0]}{more}")


def share(files: Mapping[str, FileEntry], rank: int, ranks: int) -> list[str]:
    """The files that one of `ranks` ranks looks through: together they take all, each about as many bytes."""
    loads, mine = [0] * ranks, []
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += files[name].size + 1
        if lightest == rank:
            mine.append(name)
    return mine


def differing(saved: Mapping[str, Value], current: Mapping[str, Value], names: Iterable[str]) -> str | None:
    """The first of the named values in which a checkpoint and a run differ, in words."""
    for name in names:
        if name in saved and saved[name] != current[name]:
            return f"{name} is {saved[name]!r} there and {current[name]!r} in this run"
    return None
