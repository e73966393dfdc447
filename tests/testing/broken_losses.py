"""Losses that raise, die or hang, for `check_law` and `parallel-rl verify`."""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist
from torch import Tensor

from parallel_rl import Metrics, TokenBatch
from tests.testing.planted import LocalTokens, Planted


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() and dist.get_world_size() > 1 else -1


class Raises(Planted):
    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        raise KeyError("advantage")


class RaisesOnOneRank(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        if _rank() == 1:
            raise ValueError("only rank 1 is wrong")
        return super().total(batch)


class Dies(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        if _rank() == 1:
            os._exit(7)
        return super().total(batch)


class Hangs(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        if _rank() == 1:
            time.sleep(1000)
        return super().total(batch)


class ExitsOnOneRank(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        if _rank() == 1:
            sys.exit(0)
        return super().total(batch)


class HangsAlone(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        time.sleep(1000)
        return super().total(batch)


wrong = LocalTokens()  # an instance
not_a_loss = 3


def objective(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """What `register_objective` takes, without it."""
    return -batch["advantages"] * logprobs
