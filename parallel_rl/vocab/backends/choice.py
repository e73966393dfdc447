"""Choice of the backend of a shard's passes, and of their division into Triton programs by card."""

from __future__ import annotations

import os
import shutil
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "compiled", "eager"]
BACKENDS: tuple[str, ...] = get_args(Backend)

# looked up once: torch.compile treats them as constants
_INSTALLED = find_spec("triton") is not None
#: builds the launchers of Triton's kernels; None: the torch backend is used
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
_NO_COMPILER = "install gcc or clang, or name one in the environment variable CC"
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def check_backend(backend: Backend, device: torch.device) -> None:
    """Raise ValueError for a backend that does not exist or cannot run on `device`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r} is not valid; choose one of {', '.join(BACKENDS)}")
    if backend != "triton":
        return
    if not _INSTALLED:
        raise ValueError('backend = "triton" needs Triton: pip install triton')
    if not (COMPILER or _INTERPRETED):
        raise ValueError(f'backend = "triton" needs a C compiler: {_NO_COMPILER}; "auto" runs without Triton')
    if device.type != "cuda" and not _INTERPRETED:
        raise ValueError(
            f'backend = "triton" needs logits on a CUDA device, got {device.type}; use backend = "auto", or set '
            "TRITON_INTERPRET=1 before the start to run the kernels anywhere, slowly"
        )


def runs_on_triton(z: Tensor, backend: Backend) -> bool:
    """Return whether passes over `z` run in Triton: if chosen, or with "auto" on CUDA; never in float64."""
    if backend in ("compiled", "eager") or z.dtype == torch.float64:
        return False
    if backend == "triton":
        return True
    if z.device.type != "cuda" or not _INSTALLED:
        return False
    if not COMPILER and not torch.compiler.is_compiling():
        _warn_of_no_compiler()
    return COMPILER is not None


@cache  # Python's own filter would warn for each calling line
def _warn_of_no_compiler() -> None:
    warnings.warn(f"Triton needs a C compiler, so the torch backend is used: {_NO_COMPILER}", stacklevel=3)


class Cut(NamedTuple):
    """Division of a pass on a card; with fewer rows than `programs` × multiprocessors, rows are split."""

    lanes: int  # of a tile
    warps: int  # of a program
    programs: int  # per multiprocessor


#: by (pass, compute capability), swept by `make gpu-check`; other cards use 9.0's
CUTS = {("stats", (9, 0)): Cut(512, 4, 32), ("gradient", (9, 0)): Cut(512, 8, 32)}
# thresholds compute more per logit than they load
CUTS |= {("bins", (9, 0)): Cut(512, 4, 32), ("weigh", (9, 0)): Cut(128, 4, 32), ("held", (9, 0)): Cut(128, 4, 32)}

PER_TOP = 128  # columns of kept logits with a common top: a warp's float32 columns, which need no barrier


def tops_of(columns: int) -> int:
    return -(-columns // PER_TOP)


def cut(name: str, device: torch.device) -> Cut:
    card = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return CUTS.get((name, card), CUTS[name, (9, 0)])


class Tiling(NamedTuple):
    """Division of a row: tiles of `lanes` × `per_lane` columns; `splits` programs of `columns`."""

    lanes: int
    per_lane: int
    columns: int
    splits: int
    warps: int

    def aligns(self, *numbers: int) -> bool:
        """Return whether these numbers of columns are whole lanes, loaded and stored at once."""
        return all(number % self.per_lane == 0 for number in numbers)

    def aligns_rows(self, *tensors: Tensor | None) -> bool:
        """Return whether every row of the tensors begins at 16 bytes, by stride and address."""
        return all(x is None or (self.aligns(x.stride(0)) and x.data_ptr() % 16 == 0) for x in tensors)


def tiling(tokens: int, width: int, itemsize: int, processors: int, cut: Cut) -> Tiling:
    """Return the tiles of a shard [tokens, width]; rows are split if there are too few to fill the device."""
    per_lane, lanes = 16 // itemsize, cut.lanes
    while lanes > 32 and (lanes // 2) * per_lane >= width:
        lanes //= 2
    block = lanes * per_lane
    blocks = max(1, -(-width // block))
    wanted = -(-cut.programs * processors // max(tokens, 1))
    columns = -(-blocks // min(blocks, max(1, wanted))) * block
    return Tiling(lanes, per_lane, columns, max(1, -(-width // columns)), max(1, min(cut.warps, lanes // 32)))
