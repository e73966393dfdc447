"""Check that this process, and one rank of every node, can write a run's folder."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import torch.distributed as dist

from parallel_rl.agreement import on_first_rank, raise_on_all_ranks


def check_writable(folder: Path) -> None:
    """Raise ValueError if a run's folder cannot be made or written."""
    there = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"run.dir = {str(folder)!r} cannot be written: {there}: {error.strerror}") from None


def check_on_every_node(folder: Path) -> None:
    """Raise ValueError on all ranks if a node cannot write the run's folder, or if it is not shared."""
    if dist.get_world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())):
        return  # one node
    sign, host = on_first_rank(lambda: _leave_sign(folder), f"run.dir = {str(folder)!r} cannot be used")

    def look() -> None:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        mine = socket.gethostname()
        if not (_existing(folder) / sign).exists():
            raise ValueError(
                f"run.dir = {str(folder)!r} is another folder on {mine} than on {host}: a file that {host} wrote is not there; "
                "choose a folder that all nodes share"
            )
        try:
            check_writable(folder)
        except ValueError as error:
            raise ValueError(f"on {mine}, {error}") from None

    try:
        raise_on_all_ranks(look)
    finally:
        if dist.get_rank() == 0:
            (_existing(folder) / sign).unlink(missing_ok=True)


def _leave_sign(folder: Path) -> tuple[str, str]:
    """Write a file into the folder or where it will be; return its name and this host's."""
    check_writable(folder)
    with tempfile.NamedTemporaryFile(dir=_existing(folder), prefix=".run-dir-", delete=False) as file:
        return Path(file.name).name, socket.gethostname()


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists; ValueError if none can be a folder."""
    there = folder.absolute()
    try:
        while not there.exists() and there != there.parent:
            if there.is_symlink():  # to a missing name, or to itself
                raise ValueError(f"run.dir = {str(folder)!r} cannot be made: {there} is a link to a missing path")
            there = there.parent
    except OSError as error:  # a name that is too long
        raise ValueError(f"run.dir = {str(folder)!r} cannot be made: {error.strerror}") from None
    if not there.is_dir():
        raise ValueError(f"run.dir = {str(folder)!r} cannot be made: {there} is not a folder")
    return there
