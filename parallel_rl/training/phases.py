"""The phases of a run: an optional supervised warm-up, then the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from parallel_rl.training.config import TrainConfig
from parallel_rl.training.objectives import DistillationConfig, PreferenceConfig, RLConfig, SupervisedConfig
from parallel_rl.training.rl import rl_step
from parallel_rl.training.sections import OptimizerConfig
from parallel_rl.training.session import Numbers, Session
from parallel_rl.training.steps import distillation_step, preference_step, supervised_step

Section = RLConfig | PreferenceConfig | SupervisedConfig | DistillationConfig
Run = Callable[..., Numbers]  # (session, its section, the step's number)


@dataclass(frozen=True)
class Phase:
    """`steps` calls of `run`, with one optimizer; the main phase is the last."""

    name: str
    steps: int
    optimizer: OptimizerConfig
    run: Callable[[Session, int], Numbers]
    is_main: bool


def phases(config: TrainConfig) -> list[Phase]:
    """In their order."""
    runs: list[tuple[str, Section | None, Run]] = [
        ("warmup", config.warmup, supervised_step),
        ("rl", config.rl, rl_step),
        ("preference", config.preference, preference_step),
        ("sft", config.sft, supervised_step),
        ("distillation", config.distillation, distillation_step),
    ]
    return [
        Phase(name, section.steps, section.optimizer, partial(_run, step, section), name != "warmup")
        for name, section, step in runs
        if section is not None
    ]


def _run(step: Run, section: Section, session: Session, index: int) -> Numbers:
    return step(session, section, index)
