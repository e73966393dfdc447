"""Progress of a run, in steps and in records of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainProgress:
    """Current phase ("warmup" or the main one), its steps done, and records taken of each source.

    The next record of a source with N records is `taken[name] % N` of pass `taken[name] // N`. The order of the data and the
    trainer's sampling depend only on (seed, that number).

    >>> progress = TrainProgress("rl", 0).after({"train": 64})
    >>> progress.step, progress.next("train"), progress.next("examples")
    (1, 64, 0)
    """

    phase: str
    step: int
    taken: Mapping[str, int] = field(default_factory=dict)

    def next(self, name: str) -> int:
        """Return the number of a source's next record."""
        return self.taken.get(name, 0)

    def after(self, takes: Mapping[str, int]) -> TrainProgress:
        """Return the progress one step later, which took these records of each source."""
        return TrainProgress(self.phase, self.step + 1, {name: self.next(name) + n for name, n in takes.items()})
