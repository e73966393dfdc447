"""Read and check a dumped step from the files of all data ranks."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from parallel_rl.explain.dump import FORMAT, VERSION

Meta = Mapping[str, Any]
_SAME = ("title", "loss", "config", "reads", "paired", "shift", "layout", "counts", "metrics")  # in all files of a step
_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, NotImplementedError)


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step: the sequences of all data ranks, concatenated and cut to their lengths.

    Attributes:
        name: for a reader, such as the path. meta: loss, config, counts, metrics.
        lengths: [N] tokens of each sequence. sequences: name → [N].
        tokens: name → [T], T = Σ lengths: fields of the data, and inputs and results of the loss.
        shares: contributions to the loss, "loss" and "part/NAME". texts: of token ids.
    """

    name: str
    meta: Meta
    lengths: np.ndarray
    tokens: Mapping[str, np.ndarray]
    sequences: Mapping[str, np.ndarray]
    shares: Mapping[str, float]
    texts: Mapping[int, str]

    @cached_property
    def starts(self) -> np.ndarray:
        """Return [N] the first token of each sequence."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def row(self) -> np.ndarray:
        """Return [T] the sequence of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def column(self) -> np.ndarray:
        """Return [T] the place of each token in its sequence."""
        return np.arange(len(self.row)) - self.starts[self.row]

    @cached_property
    def scored(self) -> np.ndarray:
        """Mark [T] bool the tokens that the loss reads."""
        return self.tokens["scored"]

    @property
    def kind(self) -> str:
        """Return the kind of loss; only steps of one kind can be compared."""
        if self.meta["paired"]:
            return "preference pairs"
        if "logprobs" in self.tokens:
            return "policy gradient" if "advantages" in self.tokens else "log-probs"
        return {"rows": "rows of logits", "scalar": "scalar head"}.get(self.meta["reads"], "logits")

    def value(self, name: str) -> np.ndarray | None:
        """Return [T] values of the loss's tokens, from the first component that has them."""
        keys = (key for key in self.tokens if key.startswith("value/") and key.rpartition("/")[2] == name)
        return next((self.tokens[key] for key in keys), None)


def read_step(path: str | Path) -> Step:
    """Read a dump, from its folder or a run's folder; ValueError if missing, incomplete or corrupt."""
    folder = _folder(Path(path))
    files = sorted(folder.glob("piece_*_of_*.npz"))
    number = files[0].stem.rpartition("_")[2]
    wanted = [folder / f"piece_{index:05d}_of_{number}.npz" for index in range(int(number))]
    if files != wanted:
        missing = [file.name for file in wanted if file not in files]
        more = [file.name for file in files if file not in wanted]
        raise ValueError(
            f"{folder} holds {len(files)} files of a step that has {len(wanted)}: "
            + "; ".join(
                f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("of another", more)) if names
            )
        )
    pieces = [_piece(file) for file in files]
    first = pieces[0][0]
    for file, (meta, _) in zip(files, pieces, strict=True):
        for key in _SAME:
            if json.dumps(meta[key]) != json.dumps(first[key]):
                raise ValueError(f"{file} is of another step than {files[0].name}: they differ in {key}")
    return _joined(str(path), first, pieces)


def _folder(path: Path) -> Path:
    if path.is_file():
        raise ValueError(f"{path} is a file; give the folder of a dumped step")
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder; `parallel-rl train ... --dump-step N` dumps a step")
    if any(path.glob("piece_*_of_*.npz")):
        return path
    dumps = sorted({file.parent for file in path.glob("dumps/*/piece_*_of_*.npz")})
    if not dumps:
        raise ValueError(f"{path} holds no dumped step; `parallel-rl train ... --dump-step N` dumps one")
    if len(dumps) > 1:
        raise ValueError(f"{path} holds {len(dumps)} dumped steps; choose one of {', '.join(map(str, dumps))}")
    return dumps[0]


def _piece(file: Path) -> tuple[Meta, dict[str, np.ndarray]]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        meta = json.loads(arrays.pop("meta").tobytes())
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError("it is of another program")
        if meta["version"] != VERSION:
            raise ValueError(f"its version is {meta['version']}, this program reads {VERSION}")
        _check(meta, arrays)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except _FAULTS as error:
        raise ValueError(f"{file} is not a whole file of a dumped step: {str(error) or type(error).__name__}") from None
    return meta, arrays


def _check(meta: Meta, arrays: Mapping[str, np.ndarray]) -> None:
    missing = [key for key in (*_SAME, "shares", "texts") if key not in meta]
    if missing or "lengths" not in arrays:
        raise ValueError(f"it lacks {', '.join(missing) or 'lengths'}")
    lengths = arrays["lengths"]
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise ValueError("its lengths are not numbers of tokens")
    sizes = {"token": int(lengths.sum()), "sequence": len(lengths)}
    for name, x in arrays.items():
        of = name.partition("/")[0]
        if name != "lengths" and (of not in sizes or x.shape != (sizes[of],)):
            raise ValueError(f"{name} has {list(x.shape)} numbers, its lengths need {sizes.get(of)}")
    if len(lengths):
        absent = [name for name in ("input_ids", "token_mask", "scored") if f"token/{name}" not in arrays]
        if absent or "sequence/sample_mask" not in arrays:
            raise ValueError(f"it lacks {', '.join(absent) or 'sample_mask'}")


def _joined(name: str, first: Meta, pieces: Sequence[tuple[Meta, dict[str, np.ndarray]]]) -> Step:
    """Join all pieces; order the sequences by their `sample_ids` where these are unique."""
    full = [arrays for _, arrays in pieces if len(arrays["lengths"])]
    if not full:
        raise ValueError(f"{name}: the step has no sequence")
    lengths = np.concatenate([arrays["lengths"] for arrays in full])
    everywhere = [key for key in full[0] if all(key in arrays for arrays in full)]
    joined = {key: np.concatenate([arrays[key] for arrays in full]) for key in everywhere}
    order = np.arange(len(lengths))
    ids = joined.get("sequence/sample_ids")
    if ids is not None and len(np.unique(ids)) == len(ids):
        order = np.argsort(ids)
    ends = np.cumsum(lengths)
    place = np.concatenate([np.arange(ends[row] - lengths[row], ends[row]) for row in order])
    shares: dict[str, float] = {}
    texts: dict[int, str] = {}
    for meta, _ in pieces:
        for key, value in meta["shares"].items():
            shares[key] = shares.get(key, 0.0) + value
        texts |= {int(token): str(text) for token, text in meta["texts"].items()}
    return Step(
        name,
        first,
        lengths[order],
        {key.removeprefix("token/"): x[place] for key, x in joined.items() if key.startswith("token/")},
        {key.removeprefix("sequence/"): x[order] for key, x in joined.items() if key.startswith("sequence/")},
        shares,
        texts,
    )
