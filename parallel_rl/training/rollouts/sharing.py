"""The ranks that hold the same data: one of them asks servers, all wait for it, and get what it got."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.agreement import communication_device, raise_on_all_ranks
from parallel_rl.cluster.heartbeat import tick
from parallel_rl.groups import group_rank, group_size
from parallel_rl.training.models.engine import Engine

_LOOK = 20.0  # seconds
_WAITING, _FAILED = 1, 2


class Sharing:
    """This rank's place among those that hold the same data.

    Attributes:
        asks: whether this one talks to the servers.
        groups: those of the ranks that share.
    """

    def __init__(self, engine: Engine) -> None:
        self.groups = engine.replica_groups
        self.asks = all(group_rank(group) == 0 for group in self.groups)
        self._device = engine.device

    def wait(self, futures: Sequence[Future], *, tolerant: bool = False) -> bool:
        """Wait until all are done on every rank, or (but for `tolerant`) one has failed on some: then False on all.

        Ranks look at each other now and then, so that no collective runs into its timeout while a server works.
        """
        until = ALL_COMPLETED if tolerant else FIRST_EXCEPTION
        while True:
            tick("waiting for the server")
            done, left = wait(futures, _LOOK, until)
            failed = not tolerant and any(map(failure, done))
            state = torch.tensor(_FAILED if failed else _WAITING if left else 0, device=self._device)
            dist.all_reduce(state, dist.ReduceOp.MAX)
            if int(state) != _WAITING:
                return int(state) != _FAILED

    def spread(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The asking rank's values on all that hold the same data: a sum with zeros."""
        device = torch.device("cpu")
        for group in self.groups:
            device = communication_device(group, device)
        whole = values.to(device) if self.asks else torch.zeros(shape, dtype=values.dtype, device=device)
        for group in self.groups:
            if group_size(group) > 1:
                dist.all_reduce(whole, group=group)
        return whole.cpu()

    def finish(self, orders: Sequence[Future]) -> None:
        """Wait for orders of the first rank of the world, as `wait`.

        Raises:
            ValueError: one failed, on every rank.
        """
        self.wait(orders)

        def read() -> None:
            if error := next((error for order in orders if (error := failure(order)) is not None), None):
                raise ValueError(str(error))

        raise_on_all_ranks(read)


def failure(future: Future) -> BaseException | None:
    """What a future failed with, if it is done and has."""
    return future.exception() if future.done() else None
