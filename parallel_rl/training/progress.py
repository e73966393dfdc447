"""Progress of a run, in steps and in records of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainProgress:
    """The current phase ("warmup" or the main one), the steps done in it, and the records of each source that they took,
    counted over all passes.

    The next of a source with N records is record `taken[name] % N` of pass `taken[name] // N`, whatever the sizes of the steps
    before were. The order of the data and the trainer's own draws follow from (seed, that number).

    >>> progress = TrainProgress("rl", 0).after({"train": 64})
    >>> progress.step, progress.next("train"), progress.next("examples")
    (1, 64, 0)
    """

    phase: str
    step: int
    taken: Mapping[str, int] = field(default_factory=dict)

    def next(self, name: str) -> int:
        """The number of the next record of a source."""
        return self.taken.get(name, 0)

    def after(self, takes: Mapping[str, int]) -> TrainProgress:
        """Progress one step later, which took so many records of each source."""
        return TrainProgress(self.phase, self.step + 1, {name: self.next(name) + n for name, n in takes.items()})
