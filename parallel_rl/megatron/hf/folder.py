"""A folder of safetensors (nothing else is opened), and the model's parameters as rows of its tensors."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from parallel_rl.config.architecture import Architecture
from parallel_rl.config.hf_config import read_json
from parallel_rl.megatron.weights import EMBEDDING, HEAD

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


@dataclass(frozen=True)
class Rows:
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    """A parameter as consecutive rows (width `columns`; None: a vector) of other tensors, then padding."""

    rows: tuple[Rows, ...]
    columns: int | None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the rows with their shapes; each of their rows is used once."""
        heights: dict[str, int] = {}
        for piece in self.rows:
            heights[piece.name] = max(heights.get(piece.name, 0), piece.stop)
        tail = () if self.columns is None else (self.columns,)
        return {name: (height, *tail) for name, height in heights.items()}

    def within(self, start: int, stop: int) -> Iterator[tuple[int, Rows]]:
        """Iterate over the pieces of the parameter's rows [start, stop), each with its first row there."""
        at = 0
        for piece in self.rows:
            low, high = max(start, at), min(stop, at + piece.stop - piece.start)
            if low < high:
                yield low, Rows(piece.name, piece.start + low - at, piece.start + high - at)
            at += piece.stop - piece.start


def table(model: Architecture, *, scalar_head: bool = False) -> dict[str, Source]:
    """Return the source of every parameter of the whole model, by its `spelled_locally` name.

    >>> from parallel_rl.config.architecture import Architecture
    >>> small = Architecture("qwen3", 1, hidden=8, heads=4, groups=2, head_dim=4, ffn=6, vocab=10, qk_norm=True)
    >>> [(piece.name[-13:], piece.start, piece.stop) for piece in
    ...  table(small)["decoder.layers.0.self_attention.linear_qkv.weight"].rows[:3]]
    [('q_proj.weight', 0, 8), ('k_proj.weight', 0, 4), ('v_proj.weight', 0, 4)]
    """
    sources = {
        EMBEDDING: _whole("model.embed_tokens.weight", model.vocab, model.hidden),
        "decoder.final_layernorm.weight": _whole("model.norm.weight", model.hidden),
    }
    if scalar_head:
        sources[HEAD] = _whole("score.weight", 1, model.hidden)
    elif not model.tied:
        sources[HEAD] = _whole("lm_head.weight", model.vocab, model.hidden)
    for layer in range(model.layers):
        for name, source in _layer(model, f"model.layers.{layer}."):
            sources[f"decoder.layers.{layer}.{name}"] = source
    return sources


def _layer(model: Architecture, at: str) -> Iterator[tuple[str, Source]]:
    attention, hidden = f"{at}self_attn.", model.hidden
    yield "input_layernorm.weight", _whole(f"{at}input_layernorm.weight", hidden)
    yield "self_attention.linear_qkv.weight", _interleaved(model, attention, "weight", hidden)
    if model.qkv_bias:
        yield "self_attention.linear_qkv.bias", _interleaved(model, attention, "bias", None)
    if model.qk_norm:
        for name in "qk":
            yield f"self_attention.{name}_layernorm.weight", _whole(f"{attention}{name}_norm.weight", model.head_dim)
    width = model.heads * model.head_dim
    yield "self_attention.linear_proj.weight", _whole(f"{attention}o_proj.weight", hidden, width)
    yield "pre_mlp_layernorm.weight", _whole(f"{at}post_attention_layernorm.weight", hidden)
    if model.experts is None:
        yield from _mlp("mlp.", f"{at}mlp.", model.ffn, hidden)
        return
    yield "mlp.router.weight", _whole(f"{at}mlp.gate.weight", model.experts.number, hidden)
    for expert in range(model.experts.number):
        names = f"mlp.experts.local_experts.{expert}.", f"{at}mlp.experts.{expert}."
        yield from _mlp(*names, model.experts.ffn_hidden, hidden)


def _mlp(ours: str, theirs: str, ffn: int, hidden: int) -> Iterator[tuple[str, Source]]:
    gate, up = (Rows(f"{theirs}{name}_proj.weight", 0, ffn) for name in ("gate", "up"))
    yield f"{ours}linear_fc1.weight", Source((gate, up), hidden)
    yield f"{ours}linear_fc2.weight", _whole(f"{theirs}down_proj.weight", hidden, ffn)


def _whole(name: str, rows: int, columns: int | None = None) -> Source:
    return Source((Rows(name, 0, rows),), columns)


def _interleaved(model: Architecture, at: str, kind: str, columns: int | None) -> Source:
    """Interleave for each key-value group its query heads, keys and values."""
    width = {"q": model.heads // model.groups * model.head_dim, "k": model.head_dim, "v": model.head_dim}
    pieces = [
        Rows(f"{at}{name}_proj.{kind}", group * rows, (group + 1) * rows)
        for group in range(model.groups)
        for name, rows in width.items()
    ]
    return Source(tuple(pieces), columns)
