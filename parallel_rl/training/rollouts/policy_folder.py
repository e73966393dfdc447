"""The policy's weights for inference servers: a Hugging Face folder per version; the newest two stay."""

from __future__ import annotations

import re
import shutil
import time
from functools import partial
from pathlib import Path

from parallel_rl.agreement import on_first_rank
from parallel_rl.cluster.heartbeat import tick
from parallel_rl.megatron.hf import save_hf
from parallel_rl.training.models.engine import Engine

_NEWEST = 2  # a server may still read the previous one
_NAME = re.compile(r"version_\d{6,}_\d+")


def write_policy(engine: Engine, version: int) -> Path:
    """Write the weights to a new folder of run.dir/policy, on every rank; keep the newest two.

    Every path is new, even after a restart, since engines may cache by path. Folders are published whole. RuntimeError
    or ValueError on every rank if the folder cannot be written, or the model has no Hugging Face family.
    """
    tick("writing the policy")
    parent = Path(engine.config.run.dir).absolute() / "policy"
    folder = on_first_rank(
        lambda: parent / f"version_{version:06d}_{time.time_ns() // 1_000_000}", "the policy has no folder"
    )
    save_hf(engine.bare, folder)
    on_first_rank(partial(_prune, parent), f"old weights cannot be removed from {parent}")
    return folder


def _prune(parent: Path) -> None:
    for path in parent.glob(".version_*.partial"):  # of an interrupted write
        shutil.rmtree(path)
    folders = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)]
    for path in sorted(folders, key=lambda path: path.stat().st_mtime_ns)[:-_NEWEST]:
        shutil.rmtree(path)
