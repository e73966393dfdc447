"""Ranks that hold the same data: one requests from servers, and broadcasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.agreement import (
    Unavailable,
    communication_device,
    on_first_rank,
    raise_on_all_ranks,
    sum_over_groups,
)
from parallel_rl.cluster import preemption
from parallel_rl.cluster.heartbeat import tick
from parallel_rl.groups import group_rank
from parallel_rl.servers.http_client import any_server_away
from parallel_rl.training.models.engine import Engine

_LOOK = 20.0  # seconds
_WAITING, _FAILED = 1, 2


def wait_together(futures: Sequence[Future], timeout: float, *, tolerant: bool = False, stoppable: bool = True) -> bool:
    """Wait until all are done on every rank; False on all if one failed, unless `tolerant`.

    Ranks poll each other, so that no collective reaches its `timeout`. If `stoppable`, Unavailable on every rank when a
    stop was requested while a server is away.
    """
    until = ALL_COMPLETED if tolerant else FIRST_EXCEPTION
    device = communication_device(dist.group.WORLD, torch.device("cpu"))
    while True:
        tick("waiting for the server")
        done, pending = wait(futures, min(_LOOK, timeout / 4), until)
        failed = not tolerant and any(map(failure, done))
        mine = [_FAILED if failed else _WAITING if pending else 0, preemption.asked(), any_server_away()]
        state = torch.tensor(mine, device=device)
        dist.all_reduce(state, dist.ReduceOp.MAX)
        outcome, stopping, away = state.tolist()
        if outcome != _WAITING:
            return outcome != _FAILED
        if stoppable and stopping and away:
            raise Unavailable("a stop was requested while a server is away")


class Sharing:
    """Place of this rank among `groups` that hold the same data; if it `asks`, it talks to the servers."""

    def __init__(self, engine: Engine) -> None:
        self.groups = engine.replica_groups
        self.asks = all(group_rank(group) == 0 for group in self.groups)
        self._timeout = engine.config.run.timeout

    def wait(self, futures: Sequence[Future], *, tolerant: bool = False, stoppable: bool = True) -> bool:
        return wait_together(futures, self._timeout, tolerant=tolerant, stoppable=stoppable)

    def spread(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Broadcast the requesting rank's values to its replicas, as a sum with zeros."""
        local = values if self.asks else torch.zeros(shape, dtype=values.dtype)
        return sum_over_groups(local, self.groups)

    def finish(self, orders: Sequence[Future]) -> None:
        """Wait for the world's first rank's orders; ValueError on every rank if one failed, or Unavailable."""
        self.wait(orders)
        raise_on_all_ranks(lambda: raise_first(orders))


@contextmanager
def queued_again_without_servers() -> Iterator[None]:
    """Request a restart of the job if the block raises Unavailable, and re-raise; every rank gets there."""
    try:
        yield
    except Unavailable as error:
        text = f"{error}; the same command resumes from the last checkpoint"
        on_first_rank(lambda: preemption.ask_for_restart(text), "the marker REQUEUE could not be written")
        raise


def failure(future: Future) -> BaseException | None:
    """Return the error of a finished future, if any."""
    return future.exception() if future.done() else None


def raise_first(futures: Sequence[Future]) -> None:
    """Raise the first failure: `Unavailable` unchanged, others as a ValueError."""
    if error := next((error for future in futures if (error := failure(future)) is not None), None):
        raise error if isinstance(error, Unavailable) else ValueError(str(error))
