"""What ranks do by themselves on files, with an outcome that is the same on all: results of every rank, or one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

ResultT = TypeVar("ResultT")


def world() -> tuple[int, int]:
    """This rank and the number of ranks; without a world, (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def from_all(work: Callable[[], ResultT]) -> list[ResultT]:
    """What `work` gives on each rank, on every rank; one gather.

    Raises:
        ValueError: it failed anywhere (ValueError, OSError): the message of the first rank where it did, on every rank.
    """
    found, fault = _try(work)
    gathered: list[tuple[ResultT | None, str | None]] = [(found, fault)] * world()[1]
    if dist.is_initialized():
        dist.all_gather_object(gathered, (found, fault))
    for _, message in gathered:
        if message is not None:
            raise ValueError(message)
    return [result for result, _ in gathered]  # type: ignore[misc]  # it is None only beside a fault


def read_together(work: Callable[[], ResultT], device: torch.device) -> ResultT:
    """What `work` gives here, once it is known that it failed nowhere; one flag over the world.

    Args:
        work: reads files.
        device: where the world communicates.

    Raises:
        ValueError: as in `from_all`.
    """
    found, fault = _try(work)
    failed = torch.tensor(float(fault is not None), device=device)
    if dist.is_initialized():
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failed:
        _raise(fault)
    return found  # type: ignore[return-value]  # it is None only beside a fault


def _raise(fault: str | None) -> None:
    def again() -> None:
        if fault is not None:
            raise ValueError(fault)

    from_all(again)


def _try(work: Callable[[], ResultT]) -> tuple[ResultT | None, str | None]:
    try:
        return work(), None
    except ValueError as error:
        return None, str(error)
    except OSError as error:
        rank, size = world()
        return None, f"{error} (on rank {rank})" if size > 1 else str(error)
