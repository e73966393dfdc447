"""Ranks that run a step, in this machine's pool or a running job, and their errors: refused by name, or the user's line."""

from __future__ import annotations

import contextlib
import dis
import json
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from parallel_rl.agreement import describe
from parallel_rl.testing.pool import WorldError, run_world

ResultT = TypeVar("ResultT")
_GRACE = 5.0  # seconds between the ranks' starts of one call


class Ranks(Protocol):
    """Runner of work on ranks."""

    @property
    def timeout(self) -> float:
        """Return the seconds that one call may take."""

    def run(self, world: int, work: Callable[..., ResultT], *args: object) -> list[ResultT]:
        """Run `work(rank, *args)` on `world` ranks; a WorldError lists the failures by rank."""

    def alone(self, work: Callable[..., ResultT], *args: object) -> ResultT:
        """Run `work` on one process."""


@dataclass(frozen=True)
class PoolRanks:
    """Gloo ranks of this machine."""

    timeout: float

    def run(self, world: int, work: Callable[..., ResultT], *args: object) -> list[ResultT]:
        return run_world(world, work, *args, timeout=self.timeout)

    def alone(self, work: Callable[..., ResultT], *args: object) -> ResultT:
        return _first(self.run(1, work, *args))


@dataclass
class JobRanks:
    """Ranks of the default process group; each repeats the work of one process, as a data rank.

    Outcomes are exchanged through `store`: a collective would wait for a rank that hangs.
    """

    timeout: float
    store: dist.Store
    calls: int = 0
    apart: str = ""  # why the ranks' collectives no longer match

    def run(self, world: int, work: Callable[..., ResultT], *args: object) -> list[ResultT]:
        world = dist.get_world_size()  # a layout of one process runs on all of them
        if self.apart:
            raise WorldError(
                dict.fromkeys(range(world), f"Inapplicable: left out, since {self.apart}"), {}, [], self.apart
            )
        rank, error, trace = dist.get_rank(), "", ""
        result: ResultT | None = None
        try:
            result = work(rank, *args)
        except (Exception, SystemExit) as failure:
            error, trace = describe(failure), traceback.format_exc()
        ends = self._exchange(json.dumps([error, trace]), rank, world)
        errors = {rank: text for rank, (text, _) in ends.items() if text}
        silent = sorted(set(range(world)) - ends.keys())
        if silent or errors:
            named = f"rank {', '.join(map(str, silent or errors))}"
            why = f"{named} gave no answer in {self.timeout + _GRACE:g} s" if silent else f"{named} failed"
            self.apart = "" if len(errors) == world and len(set(errors.values())) == 1 else f"{why} before"
            raise WorldError(errors, {rank: ends[rank][1] for rank in errors}, silent, why)
        results: list[ResultT] = [None] * world  # type: ignore[list-item]
        dist.all_gather_object(results, result)
        return results

    def _exchange(self, end: str, rank: int, world: int) -> dict[int, tuple[str, str]]:
        """Post this rank's outcome of a call; return those that ranks posted in time."""
        self.calls += 1
        keys = [f"whole_step/{self.calls}/{other}" for other in range(world)]
        self.store.set(keys[rank], end)
        with contextlib.suppress(dist.DistStoreError):  # not in time
            self.store.wait(keys, timedelta(seconds=self.timeout + _GRACE))
        return {
            other: tuple(json.loads(self.store.get(key))) for other, key in enumerate(keys) if self.store.check([key])
        }

    def alone(self, work: Callable[..., ResultT], *args: object) -> ResultT:
        return _first(self.run(dist.get_world_size(), work, *args))


def _first(results: list[ResultT]) -> ResultT:
    return results[0]


_PREFIX = "Inapplicable: "
_OWNERS = ("megatron.core.", "parallel_rl.")
# words of Megatron's and this library's refusals; their other errors are failures
_BY_NAME = re.compile(r"\bsupport|divisible|takes padded ones only|on a CPU give|without also enabling", re.IGNORECASE)
_FRAME = re.compile(r'File "(?P<file>[^"<>]+)", line (?P<line>\d+),? in (?P<function>\S+)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", str(Path(__file__).parents[2]) + "/")

_RANK = re.compile(r'testing/worker\.py", line \d+,? in _call')
_CUDA = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available", "_cuda_")


class Inapplicable(ValueError):
    """A layout that the model's sizes, its provider or Megatron refuses: it is not run and is no failure.

    >>> issubclass(Inapplicable, ValueError)
    True
    """


def refusal(error: BaseException) -> str:
    """Return the text of an error that refuses a layout by name; empty for any other error.

    Megatron and this library refuse with a raise or an assertion whose text names what is not supported.

    >>> refusal(Inapplicable("num_layers = 2 at test size is not divisible by 4"))
    'num_layers = 2 at test size is not divisible by 4'
    >>> refusal(KeyError("hidden"))
    ''
    """
    if isinstance(error, Inapplicable):
        return str(error)
    if not isinstance(error, ValueError | AssertionError | NotImplementedError) or error.__traceback__ is None:
        return ""
    last: TracebackType = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code, module = last.tb_frame.f_code, str(last.tb_frame.f_globals.get("__name__", ""))
    raised = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return str(error) if raised and module.startswith(_OWNERS) and _BY_NAME.search(str(error)) else ""


def needs_gpu(error: BaseException) -> bool:
    """Return whether CUDA raised the error on a machine without a GPU.

    >>> needs_gpu(AssertionError("Torch not compiled with CUDA enabled"))
    True
    """
    return not torch.cuda.is_available() and any(text in str(error) for text in _CUDA)


def refused(text: str) -> str:
    """Return the reason in a rank's error "Inapplicable: reason"; empty for any other error.

    >>> refused("Inapplicable: rows cannot be cut"), refused("ValueError: x")
    ('rows cannot be cut', '')
    """
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else ""


def user_place(trace: str, *, innermost_first: bool = False) -> str:
    """Return `file:line (function)` of the user's innermost frame in a printed traceback, or "".

    >>> user_place('File "/home/me/model.py", line 12, in provider')
    '/home/me/model.py:12 (provider)'
    """
    task = _RANK.split(trace)[0] if innermost_first else trace  # a forked rank's stack ends in the caller's script
    frames = [frame for frame in _FRAME.finditer(task) if not any(part in frame["file"] for part in _LIBRARIES)]
    if not frames:
        return ""
    frame = frames[0] if innermost_first else frames[-1]
    return f"{frame['file']}:{frame['line']} ({frame['function']})"
