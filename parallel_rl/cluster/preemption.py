"""Preemption: a stop request, agreed on by all ranks between two steps, and a marker that requests a restart.

SIGUSR1 or SIGTERM to any rank, or a file STOP in PARALLEL_RL_JOB_DIR, request a stop. A run stopped early leaves a file
REQUEUE there. torchrun kills its ranks 30 s after SIGTERM (--shutdown-timeout): the rest of a step and a save must fit in.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_CAUSES = ("", "the file STOP", *(name.name for name in _SIGNALS))  # the later wins

_ended = 0.0  # when SIGTERM came, by time.monotonic()
_seen = 0  # of _CAUSES: a signal may come before there is a run to stop
_listens = False


@dataclass(frozen=True)
class Boundary:
    """Agreement of ranks between steps: cause and rank of a stop, and whether any rank's work failed."""

    stop: str | None
    failed: bool


def listen() -> None:
    """Make SIGUSR1 and SIGTERM request a stop from now on; call it from the main thread, before `train`."""
    global _listens
    if not _listens:
        atexit.register(ignore_signals)  # an interpreter at its end would die of them
        for number in _SIGNALS:
            signal.signal(number, _remember)
        _listens = True


def ignore_signals() -> None:
    """Ignore SIGUSR1 and SIGTERM during shutdown, in a process that listens."""
    if _listens:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def asked() -> bool:
    """Return whether this rank knows of a request to stop."""
    return bool(_seen) or _asked_by_file()


def ending() -> float | None:
    """Return the seconds since SIGTERM came; None if it has not."""
    return time.monotonic() - _ended if _ended else None


def agree(device: torch.device, failed: bool) -> Boundary:
    """Exchange what the ranks know, such as a fault since the last boundary; one all-reduce."""
    import torch  # seconds, which `listen` must not wait for
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    cause = _seen or int(_asked_by_file())
    state = [cause * world + rank if cause else 0, int(failed)]
    if world > 1:
        agreed = torch.tensor(state, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        state = agreed.tolist()
    cause, rank = divmod(state[0], world)
    return Boundary(f"{_CAUSES[cause]} (rank {rank})" if cause else None, bool(state[1]))


def ask_for_restart(text: str) -> bool:
    """Write the marker file if there is a folder for it; one rank calls it. OSError if the write fails."""
    folder = _job_folder()
    if folder is None:
        return False
    partial = folder / ".REQUEUE.partial"
    with partial.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / "REQUEUE")
    return True


def _remember(number: int, frame: FrameType | None) -> None:
    global _ended, _seen
    if number == signal.SIGTERM:
        _ended = _ended or time.monotonic()
    _seen = max(_seen, _CAUSES.index(signal.Signals(number).name))


def _asked_by_file() -> bool:
    folder = _job_folder()
    return folder is not None and os.environ.get("LOCAL_RANK", "0") == "0" and (folder / "STOP").exists()


def _job_folder() -> Path | None:
    name = os.environ.get("PARALLEL_RL_JOB_DIR")
    return Path(name) if name else None
