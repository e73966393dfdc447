"""How a process ends: its exit status, and the signals of a preemption.

SIGUSR1 or SIGTERM to any rank, or a file STOP in PARALLEL_RL_JOB_DIR, request a stop. A run stopped early leaves a file
REQUEUE there. torchrun kills its ranks 30 s after SIGTERM (--shutdown-timeout): the rest of a step and a save must fit in.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from parallel_rl.cluster.progress import name_of, step_name

if TYPE_CHECKING:
    import torch

_OURS = str(Path(__file__).parents[1]) + os.sep
_LAST_SECONDS = 10.0  # for a process that fails to end by itself


def failed(error: BaseException) -> int:
    """Print the error with rank and step; return the exit status: 2 for a wrong input, else 1."""
    import torch.distributed as dist  # seconds, which a command that only ends must not wait for

    meant = _reader_left(error) or _is_meant(error)
    if not meant:
        traceback.print_exception(error)
    rank, step = os.environ.get("RANK"), step_name()
    name = name_of(int(rank), step) if rank is not None else f" ({step})" if step else ""
    cause = str(error) if meant else f"{type(error).__name__}: {error}"
    if _reader_left(error):
        cause = "nobody reads its output any more (of a pipe such as `| head`); write it to a file instead"
    elif isinstance(error, SystemExit):
        cause = f"sys.exit({error.code!r}) was called before the run was done"
    print(f"parallel-rl: error{name}: {cause}", file=sys.stderr, flush=True)
    status = 2 if isinstance(error, ValueError) else 1
    if "TORCHELASTIC_RUN_ID" in os.environ:  # its libraries may wait for the other ranks at their end
        timer = threading.Timer(_LAST_SECONDS, os._exit, (status,))
        timer.daemon = True
        timer.start()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def leave(status: int) -> NoReturn:
    """Run atexit handlers, then exit with `status`.

    It skips the interpreter's own end, which aborts (SIGABRT) if a live traceback or Megatron holds a process group's tensors.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(status)


def _reader_left(error: BaseException) -> bool:
    """Return whether stdout is a closed pipe; rich ends the program on one."""
    return isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)


def _is_meant(error: BaseException | None) -> bool:
    """Return whether the message alone explains an error: our `raise`, or a system error with a file."""
    if error is None or (isinstance(error, OSError) and error.filename is not None):
        return True
    if isinstance(error, ValueError):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1:]
    raised = bool(last) and last[0].filename.startswith(_OURS) and (last[0].line or "").startswith("raise ")
    return isinstance(error, RuntimeError) and raised and _is_meant(error.__cause__)


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
