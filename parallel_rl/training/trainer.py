"""A run from its config to its last checkpoint: warm-up, main phase, evaluation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from parallel_rl.agreement import Unavailable, on_first_rank, raise_on_all_ranks
from parallel_rl.cluster import preemption
from parallel_rl.cluster.progress import enter_step, tick
from parallel_rl.experience.rewards import reward_function
from parallel_rl.training.algorithms.evaluation import Evaluation, evaluate, shown_text
from parallel_rl.training.algorithms.phases import Phase, check_dump, phases
from parallel_rl.training.checkpointing import checkpoint, resume
from parallel_rl.training.checkpointing.checkpoint import Contents, begin_random_state, restore_random_state
from parallel_rl.training.checkpointing.contents import checkpoint_metadata, same_weights, session_contents
from parallel_rl.training.checkpointing.resume import write_config
from parallel_rl.training.checkpointing.run_folder import check_on_every_node, only_run
from parallel_rl.training.checkpointing.storage import Retention
from parallel_rl.training.config.load import as_mapping
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.checking import settle_alphabet
from parallel_rl.training.data.datasets import Datasets, find_data
from parallel_rl.training.data.reading import read_datasets
from parallel_rl.training.models.engine import build_engine, load_first_weights, start_world
from parallel_rl.training.models.train_step import StepDump
from parallel_rl.training.preflight.check import check_layout, check_vocabulary, layout_text, length_check
from parallel_rl.training.reporting.run_log import RunLog, draw_curves, read_metrics
from parallel_rl.training.rollouts.sharing import check_servers, queued_again_without_servers
from parallel_rl.training.session import TrainProgress
from parallel_rl.training.tokenizer.protocol import Tokenizer

_DRAW_EVERY, _DRAW_SHARE = 20.0, 50  # seconds between pictures, and at most this fraction of the time
_HELD_OUT = ("held_out_before", "held_out_after")  # values of a checkpoint


@dataclass(frozen=True)
class Result:
    """Outcome of a run, equal on every rank: rows, and mean held-out rewards (None: no evaluation)."""

    rows: list[dict[str, float | int | str]]
    held_out_before: float | None
    held_out_after: float | None
    seconds: float


def train(config: TrainConfig, dump_step: int | None = None) -> Result:
    """Run `config` to its end on every rank, from the newest checkpoint in its folder if there is one.

    `dump_step` is the main phase's optimizer step to write to run.dir/dumps, for `parallel-rl explain`. ValueError on
    every rank, before any work, if config, data or world size do not fit.
    """
    began = time.monotonic()
    check_dump(config, dump_step)
    files = find_data(config.data)
    for reward in config.rewards.values():
        reward_function(reward)
    start_world(config)
    check_on_every_node(Path(config.run.dir))
    check_layout(config, dist.get_world_size())
    config = settle_alphabet(config, files)
    tokenizer = raise_on_all_ranks(config.tokenizer.build)
    vocabulary = raise_on_all_ranks(lambda: check_vocabulary(config, tokenizer.vocabulary))
    with queued_again_without_servers():
        check_servers(config, vocabulary)
        data = read_datasets(config, tokenizer, files, length_check(config))
        with only_run(Path(config.run.dir), config.run.timeout):
            run = _Run(config, tokenizer, data, dump_step)
            with run.log:
                if run.run(began):
                    run.finish(time.monotonic() - began)
    return Result(run.rows, run.before, run.after, time.monotonic() - began)


class _Run:
    """Session of a run, its progress and outputs."""

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer, data: Datasets, dump_step: int | None) -> None:
        self.config = config
        self.folder = Path(config.run.dir)
        self.picture, self.next_drawing = self.folder / "curves.png", time.monotonic() + _DRAW_EVERY
        self.phases = phases(config)
        self.dump = StepDump.of(config, self.phases[-1].name, dump_step, tokenizer.decode)
        self.rows: list[dict[str, float | int | str]] = []
        self.stop: str | None = None  # the cause, after a stop was requested
        notes: list[str] = []
        steps = {phase.name: phase.steps for phase in self.phases}
        self.starts_over, self.latest = resume.find_start(config, steps, data, notes.append)
        values: Mapping[str, float | int | str] = {}
        self.progress, self.saved = TrainProgress(self.phases[0].name, 0), None
        if self.latest is not None:
            path, metadata = self.latest
            self.progress, values = metadata.progress, metadata.values
            self.saved = path, self.progress  # the newest checkpoint
        self.before, self.after = (float(values[name]) if name in values else None for name in _HELD_OUT)
        engine = build_engine(config, tokenizer.vocabulary, config.model.max_positions)
        if self.latest is None and config.run.init_from is None:
            load_first_weights(engine)
        if self._steps_done() < sum(steps.values()):
            begin_random_state(config.run.seed, engine.groups.dp_rank)
        old = resume.outputs(config) if self.starts_over else ()
        resume.check_room(config, engine, old)
        if self.starts_over:
            resume.clear_run(self.folder, old)
        self.log = raise_on_all_ranks(
            lambda: self._open_log(notes), what=f"run.dir = {config.run.dir!r} cannot be written"
        )
        for note in notes:
            self.log.say(note)
        self.engine, self.tokenizer, self.data = engine, tokenizer, data

    def run(self, began: float) -> bool:
        """Run the remaining steps; False if a stop was requested before the last."""
        random_state = self._load_start()
        self.log.say("\n".join([layout_text(self.config, self.engine), *self.data.describe()]))
        self.log.say(f"ready after {time.monotonic() - began:.0f} s")
        for phase in self.phases[self.phases.index(self._phase()) :]:
            if self.progress.step == 0:
                self._begin(phase)
            if random_state is not None:  # last, since building the models uses the generators
                restore_random_state(random_state)
                random_state = None
            self.log.phase(phase.name, phase.steps, self.progress.step)
            if self.stop is None:  # by a signal while the run started
                self._boundary()
            while self.progress.step < phase.steps and self.stop is None:
                self._step(phase)
            if self.stop is not None and self.progress.step < phase.steps:
                self._halt(self.stop, phase)
                return False
            if not phase.is_main:
                self.progress = TrainProgress(self.phases[-1].name, 0)
        return True

    def finish(self, seconds: float) -> None:
        """Evaluate, save the last checkpoint, and draw the curves."""
        if self.config.evaluation is not None:
            if self.after is None:
                self.after = self._evaluate().reward
            before = "" if self.before is None else f"{self._started}: {self.before:.3f}, "  # a run may start without
            self.log.say(f"held-out reward {before}after {self.config.objective}: {self.after:.3f}")
        if self.rows:
            self._save()
        drawn = on_first_rank(self._draw, f"all steps are done and saved, but {self.picture} could not be drawn")
        files = [*self.log.files, "checkpoints/", *([self.picture.name] if drawn else [])]
        self.log.say(f"{seconds:.0f} s; wrote {', '.join(files)} in {self.folder}")

    def _open_log(self, notes: list[str]) -> RunLog:
        """Open the run's log with the rows up to the resumed checkpoint; `notes` get changes of the config."""
        first = dist.get_rank() == 0
        config, run = as_mapping(self.config), self.config.run
        after = None if self.starts_over else self._done()
        log = RunLog(self.folder, self.config.objective, active=first, after=after, config=config, loggers=run.loggers)
        if first:
            notes += write_config(self.folder, config, starts_over=self.starts_over)
        return log

    def _draw(self) -> bool:
        """Draw the curves of the rows so far; False without data or matplotlib."""
        began = time.monotonic()
        rows = read_metrics(self.folder / "metrics.jsonl")
        drawn = draw_curves(rows, self.picture, self.folder.name, self.before)
        self.next_drawing = time.monotonic() + max(_DRAW_EVERY, _DRAW_SHARE * (time.monotonic() - began))
        return drawn

    def _load_start(self) -> Mapping[str, object] | None:
        """Load the checkpoint to resume, or first weights; return random states of the same layout."""
        config, engine = self.config, self.engine
        if self.latest is None:
            if config.run.init_from is not None:
                check = same_weights(config, "run.init_from", scalar_head=config.scalar_head)
                path = Path(config.run.init_from)
                checkpoint.load_weights(path, engine.model, check, scalar_head=config.scalar_head)
            return None
        path, metadata = self.latest
        if self.progress.step:
            self._enter(self._phase())
        random_state = checkpoint.load(path, self._contents(), metadata)
        data = self.data.describe_next(self.progress.taken)
        self.log.say(f"continuing from {path}: {self.progress.phase} step {self.progress.step}{data}")
        if random_state is None:
            self.log.say("the layout has changed: all random states start from run.seed again")
        return random_state

    def _enter(self, phase: Phase) -> None:
        """Build a phase's models and optimizers, after freeing the previous optimizer."""
        vars(self).pop("session", None)
        self.session = phase.enter(self.engine, self.tokenizer, self.data)

    def _begin(self, phase: Phase) -> None:
        """Enter a phase at its first step; before the main one evaluate and save a checkpoint."""
        tick(f"entering the {phase.name} phase")
        self._enter(phase)
        if not phase.is_main:
            return
        if self.config.evaluation is not None and self.before is None:
            self.before = self._evaluate().reward
            self.log.say(f"held-out reward {self._started}: {self.before:.3f}")
        if self.rows:
            self._save()

    def _step(self, phase: Phase) -> None:
        began = time.monotonic()
        enter_step(phase.name, self.progress.step + 1)
        session = self.session
        if self.dump is not None and phase.is_main:
            session = replace(session, policy=replace(session.policy, dump=self.dump))
        try:
            metrics = phase.run(session, self.progress)
        except Unavailable as error:  # requests come before the first update: the state is that of the last step
            self._boundary()
            self.stop = self.stop or f"a server that is away ({error})"
            return
        seconds = time.monotonic() - began
        self.progress = self.progress.after(phase.takes)
        step = self.progress.step
        last = step == phase.steps
        if phase.is_main and self._evaluates_after(step, last):
            evaluated = self._evaluate()
            metrics = {**metrics, "held_out_reward": evaluated.reward, **evaluated.metrics}
            self.after = evaluated.reward if last else None
        row = {**metrics, "seconds": seconds, "tokens_per_second": metrics["tokens"] / seconds}
        self.rows.append({"phase": phase.name, "step": step, **row})
        what = f"the row of {phase.name} step {step} could not be written in {self.folder}"
        self._boundary(lambda: self.log.step(phase.name, step, row), what)  # before a checkpoint that relies on the row
        if self.log.active and time.monotonic() >= self.next_drawing:
            with contextlib.suppress(OSError):  # the last one must succeed
                self._draw()
        every = self.config.run.checkpoint_every
        if every and step % every == 0 and not last:
            self._save()

    def _boundary(self, write: Callable[[], None] = lambda: None, what: str = "") -> None:
        """Call `write`, and agree over ranks on its failure or on a requested stop."""
        failure: Exception | None = None
        try:
            write()
        except Exception as error:
            failure = error
        boundary = preemption.agree(self.engine.device, failure is not None)
        if boundary.failed:
            raise_on_all_ranks(partial(_raise, failure), what=what)
        self.stop = boundary.stop

    def _halt(self, cause: str, phase: Phase) -> None:
        """Save, so that the same command resumes here."""
        preemption.ignore_signals()
        if self.rows and (self.saved is None or self.saved[1] != self.progress):
            self._save()
        flag = " with --run.resume auto" if self.config.run.resume == "never" else ""
        then = " starts over" if self.saved is None else f"{flag} resumes from {self.saved[0]}"
        text = (
            f"stopped by {cause} after {phase.name} step {self.progress.step} of {phase.steps}; the same command{then}"
        )
        # the other ranks look for the marker
        why = "the marker REQUEUE could not be written; all is saved"
        on_first_rank(lambda: preemption.ask_for_restart(text), why)
        self.log.say(text)

    def _save(self) -> None:
        tick("saving a checkpoint")
        on_first_rank(self.log.sync, f"the rows of {self.folder / 'metrics.jsonl'} could not be written")
        rewards = zip(_HELD_OUT, (self.before, self.after), strict=True)
        values: dict[str, float | int | str] = {**{x: y for x, y in rewards if y is not None}, **self.data.metadata()}
        metadata = checkpoint_metadata(self.config, self.progress, values)
        keep = Retention(self.config.run.keep_checkpoints, self.config.run.keep_every)
        path = checkpoint.save(self.folder / "checkpoints", self._steps_done(), self._contents(), metadata, keep)
        self.saved = path, self.progress

    def _contents(self) -> Contents:
        """Collect a checkpoint's contents; at the start of a phase only weights, which determine the rest."""
        return session_contents(self.session) if self.progress.step else Contents(self.engine)

    def _phase(self) -> Phase:
        return next(phase for phase in self.phases if phase.name == self.progress.phase)

    def _done(self) -> dict[str, int]:
        """Map phases to steps done."""
        before = self.phases[: self.phases.index(self._phase())]
        return {**{phase.name: phase.steps for phase in before}, self.progress.phase: self.progress.step}

    def _steps_done(self) -> int:
        return sum(self._done().values())

    @property
    def _started(self) -> str:
        return "after the warm-up" if self.config.warmup else "before"

    def _evaluates_after(self, step: int, last: bool) -> bool:
        evaluation = self.config.evaluation
        return evaluation is not None and (last or bool(evaluation.every and step % evaluation.every == 0))

    def _evaluate(self) -> Evaluation:
        assert self.config.evaluation is not None
        tick("evaluating")
        evaluated = evaluate(self.session, self.config.evaluation, self.progress)
        if evaluated.shown:
            self.log.text(self.progress.phase, self.progress.step, "samples", shown_text(evaluated.shown))
        return evaluated


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
