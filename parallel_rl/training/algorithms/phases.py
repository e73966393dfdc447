"""The phases of a run: an optional supervised warm-up and the main one, with the models of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from parallel_rl.config.hf_config import is_hf
from parallel_rl.experience import SampleFailures
from parallel_rl.losses.choice import LossConfig
from parallel_rl.training.algorithms.rl_step import rl_step
from parallel_rl.training.algorithms.supervised import distillation_step, preference_step, supervised_step
from parallel_rl.training.checkpointing.checkpoint import load_weights
from parallel_rl.training.checkpointing.contents import same_weights
from parallel_rl.training.config.algorithms import DistillationConfig, RLConfig, SupervisedConfig
from parallel_rl.training.config.preference import PreferenceConfig
from parallel_rl.training.config.sections import OptimizerConfig
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.datasets import Datasets
from parallel_rl.training.models.engine import Engine, build_critic, freeze_copy, load_frozen
from parallel_rl.training.models.learner import Learner, build_loss
from parallel_rl.training.models.train_step import StepMetrics
from parallel_rl.training.rollouts.remote import RemoteRollouts
from parallel_rl.training.session import Session, TrainProgress
from parallel_rl.training.tokenizer.protocol import Tokenizer

Section = RLConfig | PreferenceConfig | SupervisedConfig | DistillationConfig
Run = Callable[..., StepMetrics]  # (session, its section, its progress)


@dataclass(frozen=True)
class Phase:
    """A loss and an optimizer for `steps` calls of `run`; `takes` counts each source's records in a step."""

    name: str
    steps: int
    loss: LossConfig
    optimizer: OptimizerConfig
    updates: int
    takes: Mapping[str, int]
    run: Callable[[Session, TrainProgress], StepMetrics]
    is_main: bool

    def learner(self, engine: Engine) -> Learner:
        """Build the policy's learner of this phase: its loss, fresh moments, master weights."""
        samples = engine.config.rl is not None and self.is_main
        loss_fn = build_loss(engine, self.loss, engine.config.sampling if samples else None)
        return Learner.start(engine, loss_fn, self.optimizer, self.updates)

    def enter(self, engine: Engine, tokenizer: Tokenizer, data: Datasets) -> Session:
        """Start this phase; the main one copies the current policy as reference and critic."""
        session, config = Session(self.learner(engine), tokenizer, data), engine.config
        if not self.is_main:
            return session
        teacher, rl = None, config.rl
        reference = freeze_copy(engine) if config.needs_reference else None
        if config.teacher is not None:
            if is_hf(config.teacher):
                teacher = load_frozen(engine, config.teacher)
            else:
                teacher = freeze_copy(engine)
                load_weights(Path(config.teacher), teacher, same_weights(config, "teacher"))
        served = None if config.server is None else RemoteRollouts(engine, config.server)
        session = replace(session, reference=reference, teacher=teacher, served=served)
        if rl is None:
            return session
        critic = None
        if rl.critic is not None:
            value_loss = build_loss(engine, rl.critic.loss)
            critic = Learner.start(build_critic(engine), value_loss, rl.critic.optimizer, self.updates)
        failures = SampleFailures(rl.failed_samples)
        return replace(session, critic=critic, kl_controller=rl.build_kl_controller(), failures=failures)


def phases(config: TrainConfig) -> list[Phase]:
    """List the phases of a run in order."""
    runs: list[tuple[str, Section | None, Run]] = [
        ("warmup", config.warmup, supervised_step),
        ("rl", config.rl, rl_step),
        ("preference", config.preference, preference_step),
        ("sft", config.sft, supervised_step),
        ("distillation", config.distillation, distillation_step),
    ]
    return [
        Phase(
            name,
            section.steps,
            section.loss,
            section.optimizer,
            section.steps * (section.updates if isinstance(section, RLConfig) else 1),
            _takes(config, section),
            partial(_run, step, section),
            name != "warmup",
        )
        for name, section, step in runs
        if section is not None
    ]


def check_dump(config: TrainConfig, step: int | None) -> None:
    """Raise ValueError if the main phase has no such optimizer step to dump."""
    if step is None:
        return
    main, critic = phases(config)[-1], None if config.rl is None else config.rl.critic
    first = 1 if critic is None else 1 + critic.warmup_steps * main.updates // main.steps
    if not first <= step <= main.updates:
        raise ValueError(
            f"--dump-step {step} is not valid: the policy's optimizer steps in {main.name} are {first} to {main.updates}"
        )


def _takes(config: TrainConfig, section: Section) -> dict[str, int]:
    """Count the records of a step, with those that later rounds of dynamic sampling may need."""
    if isinstance(section, PreferenceConfig):
        return {section.source: section.records}
    if isinstance(section, SupervisedConfig):
        return {section.source: section.batch_size}
    if isinstance(section, RLConfig):
        experts = {"examples": section.experts} if section.experts else {}
        if config.data.rollouts is not None:
            return {"rollouts": section.prompts * section.group_size, **experts}
        return {"train": section.prompts * section.rounds, **experts}
    on_policy = isinstance(section, DistillationConfig) and section.rows == "policy"
    return {"train" if on_policy else "examples": section.batch_size}


def _run(step: Run, section: Section, session: Session, at: TrainProgress) -> StepMetrics:
    return step(session, section, at)
