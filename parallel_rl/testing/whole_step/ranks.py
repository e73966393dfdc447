"""The ranks that a step runs on: those of this machine's pool, or those of a job under way."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch.distributed as dist

from parallel_rl.agreement import describe
from parallel_rl.testing.pool import WorldError, run_world

ResultT = TypeVar("ResultT")


class Ranks(Protocol):
    """Runs work on ranks."""

    @property
    def timeout(self) -> float:
        """Seconds that one call may take."""

    def run(self, world: int, work: Callable[..., ResultT], *args: object) -> list[ResultT]:
        """Run `work(rank, *args)` on so many ranks; a WorldError says what failed where."""

    def alone(self, work: Callable[..., ResultT], *args: object) -> ResultT:
        """Run the work of one process."""


@dataclass(frozen=True)
class PoolRanks:
    """Gloo ranks of this machine."""

    timeout: float

    def run(self, world: int, work: Callable[..., ResultT], *args: object) -> list[ResultT]:
        return run_world(world, work, *args, timeout=self.timeout)

    def alone(self, work: Callable[..., ResultT], *args: object) -> ResultT:
        return _first(self.run(1, work, *args))


@dataclass(frozen=True)
class JobRanks:
    """Ranks of the default process group. Work of one process runs on each of them, as data ranks with the same rows."""

    timeout: float

    def run(self, world: int, work: Callable[..., ResultT], *args: object) -> list[ResultT]:
        rank, error, trace = dist.get_rank(), "", ""
        result: ResultT | None = None
        try:
            result = work(rank, *args)
        except (Exception, SystemExit) as failure:
            error, trace = describe(failure), traceback.format_exc()
        found: list[tuple[ResultT, str, str]] = [None] * dist.get_world_size()  # type: ignore[list-item]
        dist.all_gather_object(found, (result, error, trace))
        errors = {rank: text for rank, (_, text, _) in enumerate(found) if text}
        if errors:
            traces = {rank: found[rank][2] for rank in errors}
            raise WorldError(errors, traces, [], f"rank {', '.join(map(str, errors))} failed")
        return [one for one, *_ in found]

    def alone(self, work: Callable[..., ResultT], *args: object) -> ResultT:
        return _first(self.run(dist.get_world_size(), work, *args))


def _first(results: list[ResultT]) -> ResultT:
    return results[0]
