"""Check the names in a checkpoint's pickles before Megatron and torch load any of them."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

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
