"""Ranks that run a step: this machine's pool, or a running job."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

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
