"""A run from its config to its last checkpoint: warm-up, reference, objective, evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
import yaml

from parallel_rl.agreement import on_first_rank, raise_on_all_ranks
from parallel_rl.cluster import preemption
from parallel_rl.cluster.heartbeat import enter_step, tick
from parallel_rl.experience.rewards import reward_function
from parallel_rl.training.algorithms.evaluation import held_out_reward
from parallel_rl.training.algorithms.phases import Phase, phases
from parallel_rl.training.checkpointing import checkpoint, resume
from parallel_rl.training.checkpointing.checkpoint import Contents
from parallel_rl.training.checkpointing.contents import checkpoint_metadata, same_weights, session_contents
from parallel_rl.training.checkpointing.manifest import CheckpointMetadata
from parallel_rl.training.checkpointing.random_state import begin_random_state, restore_random_state
from parallel_rl.training.checkpointing.storage import Retention
from parallel_rl.training.config.load import as_mapping
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.datasets import Datasets, find_data, read_datasets
from parallel_rl.training.models.engine import Engine, build_critic, build_engine, freeze_copy, start_world
from parallel_rl.training.models.learner import Learner, build_loss
from parallel_rl.training.preflight.sizes import check_layout, length_check
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.reporting.curves import draw_curves
from parallel_rl.training.reporting.run_log import RunLog, read_metrics, write_whole
from parallel_rl.training.rollouts.remote import RemoteRollouts
from parallel_rl.training.session import Session
from parallel_rl.training.tokenizer import CharTokenizer


@dataclass(frozen=True)
class Result:
    """What a run leaves behind, equal on every rank: its rows, the mean held-out reward before and after (None: no evaluation)
    and how long it took."""

    rows: list[dict[str, float | int | str]]
    held_out_before: float | None
    held_out_after: float | None
    seconds: float


def train(config: TrainConfig) -> Result:
    """Runs `config` to its end on every rank of the world, or from the newest checkpoint in its folder on.

    Raises:
        ValueError: anything in the config, the data or the world's size that does not fit; on every rank, before any work.
    """
    began = time.monotonic()
    tokenizer = CharTokenizer(config.tokenizer.alphabet)
    files = find_data(config.data)
    reward_function(config.reward)
    start_world(config)
    check_layout(config, dist.get_world_size())
    data = read_datasets(config, tokenizer, files, length_check(config))
    run = _Run(config, tokenizer, data)
    with run.log:
        if run.go():
            run.finish(time.monotonic() - began)
    return Result(run.rows, run.before, run.after, time.monotonic() - began)


class _Run:
    """The state that changes while a run goes on."""

    def __init__(self, config: TrainConfig, tokenizer: CharTokenizer, data: Datasets) -> None:
        self.config = config
        self.folder = Path(config.run.dir)
        self.phases = phases(config)
        self.first = dist.get_rank() == 0
        said: list[str] = []
        steps = {phase.name: phase.steps for phase in self.phases}
        self.anew, self.latest = resume.find_start(config, steps, data, said.append)
        metadata = None if self.latest is None else self.latest[1]
        self.progress = TrainProgress(self.phases[0].name, 0) if metadata is None else metadata.progress
        self.values = {} if metadata is None else metadata.values
        self.before, self.after = self._fact("held_out_before"), self._fact("held_out_after")
        self.rows: list[dict[str, float | int | str]] = []
        self.stop: str | None = None
        self.saved = self.latest and (self.latest[0], self.progress)  # the newest checkpoint, and where it stands
        engine = build_engine(config, tokenizer.vocab_size, config.model.max_positions)
        if sum(self._done().values()) < sum(phase.steps for phase in self.phases):
            begin_random_state(config.run.seed, engine.groups.dp_rank)
        left = resume.left_by(config) if self.anew else ()
        resume.check_room(config, engine, left)
        if self.anew:
            resume.start_anew(self.folder, left)
        self.log = raise_on_all_ranks(self._open_log, what=f"run.dir = {config.run.dir!r} cannot be written")
        for text in said:
            self.log.say(text)
        self.session = Session(self._learner(engine, self.phases[0]), tokenizer, data)

    def _open_log(self) -> RunLog:
        """The run's record; it keeps the rows up to the checkpoint that is continued from."""
        after = None if self.anew else self._done()
        log = RunLog(self.folder, self.config.objective, active=self.first, after=after)
        if self.first:
            write_whole(self.folder / "config.yaml", yaml.safe_dump(as_mapping(self.config), sort_keys=False))
        return log

    def go(self) -> bool:
        """Every step that is left; False where it was asked to stop before the last."""
        names, random = [phase.name for phase in self.phases], None
        if self.latest is not None:
            random = self._restore(*self.latest)
        elif self.config.run.init_from is not None:
            engine, start = self.session.engine, Path(self.config.run.init_from)
            scalar_head = self.config.scalar_head
            check = same_weights(self.config, "run.init_from", scalar_head=scalar_head)
            checkpoint.load_weights(start, engine.model, check, scalar_head=scalar_head)
            # master weights of what was just loaded
            self.session = replace(self.session, policy=self._learner(engine, self.phases[0]))
        self._describe()
        for phase in self.phases[names.index(self.progress.phase) :]:
            if phase.is_main and self.progress.step == 0:
                self._enter_main(phase)
            if random is not None:  # last of all: what was built until now has drawn from them
                restore_random_state(random)
                random = None
            self.log.phase(phase.name, phase.steps, self.progress.step)
            if self.stop is None:  # of a signal while the run started
                self._boundary(None)
            while self.progress.step < phase.steps and self.stop is None:
                self._step(phase)
            if self.stop is not None and self.progress.step < phase.steps:
                self._halt(self.stop, phase)
                return False
            if not phase.is_main:
                self.progress = TrainProgress(self.phases[-1].name, 0)
        return True

    def finish(self, seconds: float) -> None:
        if self.config.evaluation is not None:
            if self.after is None:
                self.after = self._evaluate()
            started = "after the warm-up" if self.config.warmup else "before"
            # a run that is continued may have begun without an evaluation
            before = "" if self.before is None else f"{started}: {self.before:.3f}, "
            self.log.say(f"held-out reward {before}after {self.config.objective}: {self.after:.3f}")
        if self.rows:
            self._save()
        picture = self.folder / "curves.png"

        def draw() -> bool:
            return draw_curves(read_metrics(self.folder / "metrics.jsonl"), picture, self.folder.name, self.before)

        drawn = on_first_rank(draw, f"all steps are done and saved, but {picture} could not be drawn")
        wrote = "metrics.jsonl, tensorboard/, checkpoints/" + (f", {picture.name}" if drawn else "")
        self.log.say(f"{seconds:.0f} s; wrote {wrote} in {self.folder}")

    def _step(self, phase: Phase) -> None:
        began = time.monotonic()
        enter_step(phase.name, self.progress.step + 1)
        numbers = phase.run(self.session, self.progress)
        seconds = time.monotonic() - began
        self.progress = self.progress.after(phase.takes)
        evaluation, step = self.config.evaluation, self.progress.step
        last = step == phase.steps
        if evaluation is not None and phase.is_main and (last or (evaluation.every and step % evaluation.every == 0)):
            reward = self._evaluate()
            numbers = {**numbers, "held_out_reward": reward}
            self.after = reward if last else None
        row = {**numbers, "seconds": seconds, "tokens_per_second": numbers["tokens"] / seconds}
        self.rows.append({"phase": phase.name, "step": step, **row})
        why = f"the row of {phase.name} step {step} could not be written in {self.folder}"
        # before a checkpoint that counts on the row
        self._boundary(lambda: self.log.step(phase.name, step, row), why)
        every = self.config.run.checkpoint_every
        if every and step % every == 0 and not last:
            self._save()

    def _boundary(self, work: Callable[[], None] | None, why: str = "") -> None:
        """Does what may fail on one rank, and hears of the others: whether theirs failed, whether one was asked to stop."""
        failure: Exception | None = None
        try:
            if work is not None:
                work()
        except Exception as error:
            failure = error
        found = preemption.agree(self.session.engine.device, failure is not None)
        if found.failed:
            raise_on_all_ranks(partial(_raise, failure), what=why)
        self.stop = found.stop

    def _halt(self, cause: str, phase: Phase) -> None:
        """Leaves everything such that the same command goes on from here."""
        preemption.ignore_signals()
        if self.rows and (self.saved is None or self.saved[1] != self.progress):
            self._save()
        given = " with --run.resume auto" if self.config.run.resume == "never" else ""
        then = " begins anew" if self.saved is None else f"{given} goes on from {self.saved[0]}"
        text = (
            f"stopped by {cause} after {phase.name} step {self.progress.step} of {phase.steps}; the same command{then}"
        )
        # the other ranks hear of it when the marker is there
        why = "the marker REQUEUE could not be written; all is saved"
        on_first_rank(lambda: preemption.ask_for_restart(text), why)
        self.log.say(text)

    def _enter_main(self, phase: Phase) -> None:
        """Fresh moments, the other models, the first evaluation, and a checkpoint to start again from."""
        tick("entering the main phase")
        self.session = self._with_models(self._learner(self.session.engine, phase))
        if self.config.evaluation is not None and self.before is None:
            self.before = self._evaluate()
            self.log.say(
                f"held-out reward {'after the warm-up' if self.config.warmup else 'before'}: {self.before:.3f}"
            )
        if self.rows:
            self._save()

    def _with_models(self, policy: Learner) -> Session:
        """The session of the main phase: reference and critic begin as copies of the present policy."""
        config, engine = self.config, self.session.engine
        reference = freeze_copy(engine) if config.needs_reference else None
        teacher = critic = None
        if config.teacher is not None:
            teacher = freeze_copy(engine)
            checkpoint.load_weights(Path(config.teacher), teacher, same_weights(config, "teacher"))
        if config.rl is not None and config.rl.critic is not None:
            value_loss, critic_optimizer = build_loss(engine, config.rl.critic.loss), config.rl.critic.optimizer
            critic = Learner.start(build_critic(engine), value_loss, critic_optimizer, policy.updates)
        rl = config.rl
        served = None if rl is None or rl.server is None else RemoteRollouts(engine, rl.server)
        controller = None if rl is None else rl.build_kl_controller()
        return replace(
            self.session,
            policy=policy,
            reference=reference,
            teacher=teacher,
            critic=critic,
            served=served,
            kl_controller=controller,
        )

    def _learner(self, engine: Engine, phase: Phase) -> Learner:
        sampling = self.config.sampling if self.config.rl is not None and phase.is_main else None
        return Learner.start(engine, build_loss(engine, phase.loss, sampling), phase.optimizer, phase.updates)

    def _restore(self, path: Path, metadata: CheckpointMetadata) -> Mapping[str, object] | None:
        """Goes on from a checkpoint; gives the random states to go on from, in the layout that wrote them."""
        engine, phase = self.session.engine, next(p for p in self.phases if p.name == self.progress.phase)
        policy = self._learner(engine, phase)
        if not self.progress.step:
            random = checkpoint.load(path, Contents(engine), metadata)
            policy = self._learner(engine, phase)  # master weights of what was just loaded
            self.session = replace(self.session, policy=policy)
        else:
            began = self._with_models(policy) if phase.is_main else replace(self.session, policy=policy)
            self.session = began
            random = checkpoint.load(path, session_contents(began, self.progress), metadata)
        data = self.session.data.describe_next(self.progress.taken)
        self.log.say(f"continuing from {path}: {self.progress.phase} step {self.progress.step}{data}")
        if random is None:
            self.log.say(
                "the layout has changed: Python's, numpy's and torch's random states begin anew, as run.seed has them"
            )
        return random

    def _save(self) -> None:
        tick("saving a checkpoint")
        on_first_rank(self.log.sync, f"the rows of {self.folder / 'metrics.jsonl'} could not be written")
        values: dict[str, float | int | str] = {**self.session.data.metadata()}
        for name, value in (("held_out_before", self.before), ("held_out_after", self.after)):
            if value is not None:
                values[name] = value
        folder, run, parts = self.folder / "checkpoints", self.config.run, session_contents(self.session, self.progress)
        metadata, keep = (
            checkpoint_metadata(self.config, self.progress, values),
            Retention(run.keep_checkpoints, run.keep_every),
        )
        path = checkpoint.save(folder, sum(self._done().values()), parts, metadata, keep)
        self.saved = path, self.progress

    def _done(self) -> dict[str, int]:
        """Steps done in each phase."""
        names = [phase.name for phase in self.phases]
        before = self.phases[: names.index(self.progress.phase)]
        return {**{phase.name: phase.steps for phase in before}, self.progress.phase: self.progress.step}

    def _evaluate(self) -> float:
        assert self.config.evaluation is not None
        tick("evaluating")
        return held_out_reward(self.session, self.config.evaluation.samples)

    def _fact(self, name: str) -> float | None:
        return float(self.values[name]) if name in self.values else None

    def _describe(self) -> None:
        sizes, engine = self.config.parallel, self.session.engine
        weights = sum(parameter.numel() for parameter in engine.bare.parameters())
        layout = f"TP {sizes.tensor} × CP {sizes.context} × PP {sizes.pipeline} × DP {engine.groups.dp_size}"
        batch = self.config.batch
        rows = ("packed" if batch.tokens is None else f"packed in {batch.tokens} tokens") if batch.packing else "padded"
        parallel = ", sequence parallel" if sizes.sequence_parallel else ""
        self.log.say(f"{layout}{parallel}, {rows}, {self.config.run.dtype}, {weights:,} weights on this rank")
        for line in self.session.data.describe():
            self.log.say(line)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
