"""Models, data and state shared by the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from parallel_rl.experience import FailedSamplesConfig, SampleFailures
from parallel_rl.experience.kl_control import AdaptiveKLController
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
