"""Choice of the backend that runs the passes over a vocabulary shard."""

from __future__ import annotations

import os
import shutil
import warnings
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args

import torch

if TYPE_CHECKING:
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
            f'backend = "triton" needs logits on a CUDA device, got {device.type}; "auto" chooses what fits '
            "(TRITON_INTERPRET=1, set before the start, runs the kernels anywhere, slowly)"
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
