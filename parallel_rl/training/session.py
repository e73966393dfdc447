"""Models, data, state and progress that the steps of a run share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from parallel_rl.experience import FailedSamplesConfig, SampleFailures
from parallel_rl.experience.pipeline import AdaptiveKLController
from parallel_rl.training.data.datasets import Datasets
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.models.learner import Learner
from parallel_rl.training.rollouts.remote import RemoteRollouts
from parallel_rl.training.tokenizer.protocol import Tokenizer


@dataclass(frozen=True)
class Session:
    """Models and data of a phase; None for those that the run does not have.

    `reference` is a frozen copy of the main phase's first policy, `teacher` a frozen model from another run's
    checkpoint, `served` the servers that sample the policy's completions.
    """

    policy: Learner
    tokenizer: Tokenizer
    data: Datasets
    critic: Learner | None = None
    reference: torch.nn.Module | None = None
    teacher: torch.nn.Module | None = None
    served: RemoteRollouts | None = None
    kl_controller: AdaptiveKLController | None = None
    failures: SampleFailures = field(default_factory=lambda: SampleFailures(FailedSamplesConfig()))

    @property
    def engine(self) -> Engine:
        """Return the policy's engine."""
        return self.policy.engine


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
