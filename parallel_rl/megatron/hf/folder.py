"""A folder of safetensors: its tensors, and rows of them. Only JSON and safetensors are opened."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from parallel_rl.config.hf_config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = ("F64", "F32", "BF16", "F16")
_SHOWN = 4  # names in a message


@dataclass(frozen=True)
class Folder:
    """Tensors of a folder: each one's file and shape, from the files' headers."""

    path: Path
    files: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]


def require_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ValueError(
            "weights are read and written with safetensors, which is not installed: pip install safetensors"
        )


def read_folder(path: Path) -> Folder:
    """Read the headers of a folder's safetensors files.

    ValueError for missing or only pickled weights, an index that names a missing or outside file or misplaces a tensor, a
    truncated file, or a dtype that is no float.
    """
    require_safetensors()
    placed, names = _placed(path)
    files: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    with Reader(path) as reader:
        for name in names:
            for tensor, shape, dtype in reader.header(name):
                if tensor in files:
                    raise ValueError(f"{path}: {tensor} is in {files[tensor]} and in {name}")
                if dtype not in _FLOATS:
                    raise ValueError(f"{path / name}: {tensor} is {dtype}; {', '.join(_FLOATS)} are read")
                files[tensor], shapes[tensor] = name, shape
    for tensor, name in placed.items():
        if files.get(tensor) != name:
            raise ValueError(f"{path / INDEX} places {tensor} in {name}, which does not hold it")
    return Folder(path, files, shapes)


def _placed(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the index's places of tensors (empty without an index), and the files to open."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder")
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ValueError(f"{path / INDEX} has no weight_map")
        placed = {str(tensor): str(name) for tensor, name in weight_map.items()}
        names = sorted(set(placed.values()))
        for name in names:
            # a link may lead out of the folder (as in the hub's cache), a name may not
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{path / INDEX} names {name!r}, which is not a safetensors file of this folder")
            if not (path / name).is_file():
                raise ValueError(f"{path / INDEX} names {name!r}, which is missing")
        return placed, names
    if (path / SINGLE).is_file():
        return {}, [SINGLE]
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ValueError(
            f"{path} has no safetensors, but {pickles[0]}, a pickle, which is never opened: it can run any program; save the "
            "model again with safe_serialization=True"
        )
    raise ValueError(f"{path} has no weights: neither {SINGLE} nor {INDEX} is there")


def check_names(folder: Folder, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
    """Refuse missing, reshaped or unexpected tensors (`ignored`: allowed endings); name the first few."""
    missing = [name for name in expected if name not in folder.shapes]
    unread = [name for name in folder.shapes if name not in expected and not name.endswith(ignored or (" ",))]
    for names, what in ((missing, "lacks"), (unread, "holds tensors that this model would not read:")):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise ValueError(f"{folder.path} {what} {', '.join(sorted(names)[:_SHOWN])}{more}")
    for name, shape in expected.items():
        if folder.shapes[name] != shape:
            raise ValueError(
                f"{folder.path / folder.files[name]}: {name} has shape {list(folder.shapes[name])}; config.json means "
                f"{list(shape)}"
            )


class Reader:
    """Context manager that opens each file of a folder once, and reads rows of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()
        self._open: dict[str, object] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def header(self, file: str) -> list[tuple[str, tuple[int, ...], str]]:
        opened = self._file(file)
        slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 it is not a mapping
        return [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices]

    def rows(self, file: str, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> Tensor:
        """Read only rows [start, stop) of a tensor, or their [start, stop) columns."""
        tensor = self._file(file).get_slice(name)
        part: Tensor = tensor[start:stop] if columns is None else tensor[start:stop, columns[0] : columns[1]]
        return part

    def _file(self, name: str):  # type: ignore[no-untyped-def]  # safetensors has no type for it
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            try:
                self._open[name] = self._stack.enter_context(safe_open(self.path / name, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / name} is not a whole safetensors file: {error}") from None
        return self._open[name]
