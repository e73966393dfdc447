"""Work that may fail on one rank: where it does, every rank hears of it and raises, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

ResultT = TypeVar("ResultT")


def on_every_rank(work: Callable[[], ResultT], what: str) -> ResultT:
    """What `work` gives on this rank; one collective. Every rank of the world calls it.

    `work` must not communicate, unless it fails on all ranks alike.

    Raises:
        RuntimeError: `what` and, for each rank on which `work` failed, the rank and the cause; on all ranks.
    """
    found, failure = _attempt(work)
    causes: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(causes, None if failure is None else describe(failure))
    if any(cause is not None for cause in causes):
        raise RuntimeError(f"{what}: {_listed(causes)}") from failure
    assert found is not None
    return found[0]


def on_first_rank(work: Callable[[], ResultT], what: str) -> ResultT:
    """What `work` gives on rank 0, where alone it runs, on every rank (pickled); one collective.

    Raises:
        ValueError: what `work` raised.
        RuntimeError: `what` and any other cause; on all ranks both.
    """
    found, failure = _attempt(work) if dist.get_rank() == 0 else (None, None)
    told = [(found, failure if isinstance(failure, ValueError) else None, failure and describe(failure))]
    dist.broadcast_object_list(told, src=0)
    found, refusal, cause = told[0]
    if refusal is not None:
        raise refusal
    if cause is not None:
        raise RuntimeError(f"{what}: rank 0: {cause}") from failure
    assert found is not None
    return found[0]


def describe(error: BaseException) -> str:
    """The kind of an error and its message in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if isinstance(error, CheckpointException):  # torch puts whole tracebacks into it; what went wrong stands last
        return lines[-1] if lines else "CheckpointException"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _attempt(work: Callable[[], ResultT]) -> tuple[tuple[ResultT] | None, BaseException | None]:
    try:
        return (work(),), None
    except (Exception, CheckpointException) as error:  # the second is no Exception
        return None, error


def _listed(causes: Sequence[str | None]) -> str:
    """Each cause once, with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, cause in enumerate(causes):
        if cause is not None:
            ranks.setdefault(cause, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, found))}: {cause}" for cause, found in ranks.items())
