"""End a rank that failed: one line for its cause, and an exit that nothing holds up."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from parallel_rl.cluster.heartbeat import step_name
from parallel_rl.cluster.watchdog_report import name_of

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
