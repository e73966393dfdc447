"""A run from its config to its last checkpoint: warm-up, reference, objective, evaluation."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
import yaml
from megatron.core.optimizer import MegatronOptimizer

from parallel_rl.experience.rewards import reward_function
from parallel_rl.losses.mix import MixLossFn
from parallel_rl.training import checkpoint
from parallel_rl.training.batching import width_unit
from parallel_rl.training.checkpoint import Contents, Position
from parallel_rl.training.config import TrainConfig
from parallel_rl.training.datasets import Datasets, read_datasets
from parallel_rl.training.engine import build_critic, build_engine, build_optimizer, freeze_copy, start_world
from parallel_rl.training.load import as_mapping
from parallel_rl.training.logging import RunLog, read_metrics
from parallel_rl.training.phases import Phase, phases
from parallel_rl.training.plot import draw_curves
from parallel_rl.training.sections import data_parallel_size
from parallel_rl.training.session import Critic, Session
from parallel_rl.training.steps import held_out_reward
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
    data = read_datasets(config, tokenizer)
    reward_function(config.reward)
    start_world(config)
    _check_layout(config, data, dist.get_world_size())
    run = _Run(config, tokenizer, data)
    with run.log:
        run.go()
        run.finish(time.monotonic() - began)
    return Result(run.rows, run.before, run.after, time.monotonic() - began)


class _Run:
    """The state that changes while a run goes on."""

    def __init__(self, config: TrainConfig, tokenizer: CharTokenizer, data: Datasets) -> None:
        self.config = config
        self.folder = Path(config.run.dir)
        self.phases = phases(config)
        self.first = dist.get_rank() == 0
        if config.run.resume == "never" and self.first:
            recorded = ("rollouts",) if config.rl is not None and config.rl.record else ()
            for name in ("checkpoints", "tensorboard", *recorded):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        dist.barrier()
        self.latest = checkpoint.newest(self.folder / "checkpoints")
        dist.barrier()
        self.position, self.facts = (
            checkpoint.peek(self.latest) if self.latest else (Position(self.phases[0].name, 0), {})
        )
        names = [phase.name for phase in self.phases]
        if self.position.phase not in names:
            raise ValueError(
                f"{self.latest} stands in the phase {self.position.phase!r}; this run has {', '.join(names)}. "
                "Choose another run.dir, or run.resume = 'never'"
            )
        self.before, self.after = self._fact("held_out_before"), self._fact("held_out_after")
        self.rows: list[dict[str, float | int | str]] = []
        self.log = RunLog(self.folder, config.objective, active=self.first, after=self._done() if self.latest else None)
        engine = build_engine(config, tokenizer.vocab_size, config.model.max_positions)
        self.session = Session(engine, tokenizer, data, build_optimizer(engine, self.phases[0].optimizer))
        if self.first:
            text = yaml.safe_dump(as_mapping(config), sort_keys=False)
            (self.folder / "config.yaml").write_text(text, encoding="utf-8")

    def go(self) -> None:
        names = [phase.name for phase in self.phases]
        if self.latest is not None:
            self._restore(self.latest)
        elif self.config.run.init_from is not None:
            engine, start = self.session.engine, Path(self.config.run.init_from)
            checkpoint.load_weights(start, engine.model, scalar_head=self.config.scalar_head)
            # master weights of what was just loaded
            self.session = replace(self.session, optimizer=build_optimizer(engine, self.phases[0].optimizer))
        self._describe()
        for phase in self.phases[names.index(self.position.phase) :]:
            if phase.is_main and self.position.step == 0:
                self._enter_main(phase)
            self.log.phase(phase.name, phase.steps, self.position.step)
            while self.position.step < phase.steps:
                self._step(phase)
            if not phase.is_main:
                self.position = Position(self.phases[-1].name, 0)

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
        if self.first:
            picture = self.folder / "curves.png"
            rows = read_metrics(self.folder / "metrics.jsonl")
            drawn = draw_curves(rows, picture, self.folder.name, self.before)
            wrote = "metrics.jsonl, tensorboard/, checkpoints/" + (f", {picture.name}" if drawn else "")
            self.log.say(f"{seconds:.0f} s; wrote {wrote} in {self.folder}")

    def _step(self, phase: Phase) -> None:
        began = time.monotonic()
        numbers = phase.run(self.session, self.position.step)
        seconds = time.monotonic() - began
        self.position = Position(phase.name, self.position.step + 1)
        evaluation, step = self.config.evaluation, self.position.step
        last = step == phase.steps
        if evaluation is not None and phase.is_main and (last or (evaluation.every and step % evaluation.every == 0)):
            reward = self._evaluate()
            numbers = {**numbers, "held_out_reward": reward}
            self.after = reward if last else None
        row = {**numbers, "seconds": seconds, "tokens_per_second": numbers["tokens"] / seconds}
        self.rows.append({"phase": phase.name, "step": step, **row})
        self.log.step(phase.name, step, row)
        every = self.config.run.checkpoint_every
        if every and step % every == 0 and not last:
            self._save()

    def _enter_main(self, phase: Phase) -> None:
        """Fresh moments, the other models, the first evaluation, and a checkpoint to start again from."""
        engine = self.session.engine
        self.session = self._with_models(build_optimizer(engine, phase.optimizer))
        if self.config.evaluation is not None and self.before is None:
            self.before = self._evaluate()
            self.log.say(
                f"held-out reward {'after the warm-up' if self.config.warmup else 'before'}: {self.before:.3f}"
            )
        if self.rows:
            self._save()

    def _with_models(self, optimizer: MegatronOptimizer) -> Session:
        """The session of the main phase: reference and critic begin as copies of the present policy."""
        config, engine = self.config, self.session.engine
        reference = freeze_copy(engine) if config.needs_reference else None
        teacher = critic = None
        if config.teacher is not None:
            teacher = freeze_copy(engine)
            checkpoint.load_weights(Path(config.teacher), teacher)
        if config.rl is not None and config.rl.critic is not None:
            values = build_critic(engine)
            critic = Critic(values, build_optimizer(values, config.rl.critic.optimizer))
        loss_fn = None if config.rl is None else self.session.loss(config.rl.loss, self.session.temperature)
        return replace(
            self.session, optimizer=optimizer, reference=reference, teacher=teacher, critic=critic, policy_loss=loss_fn
        )

    def _restore(self, path: Path) -> None:
        engine, phase = self.session.engine, next(p for p in self.phases if p.name == self.position.phase)
        optimizer = build_optimizer(engine, phase.optimizer)
        if not self.position.step:
            checkpoint.load(path, Contents(engine))
            optimizer = build_optimizer(engine, phase.optimizer)  # master weights of what was just loaded
            self.session = replace(self.session, optimizer=optimizer)
        else:
            began = self._with_models(optimizer) if phase.is_main else replace(self.session, optimizer=optimizer)
            self.session = began
            checkpoint.load(path, self._contents())
        self.log.say(f"continuing from {path}: {self.position.phase} step {self.position.step}")

    def _contents(self) -> Contents:
        """What a checkpoint of this moment holds: at the start of a phase, all but the weights follows from them."""
        session = self.session
        if not self.position.step:
            return Contents(session.engine)
        critic, loss_fn = session.critic, session.policy_loss
        return Contents(
            session.engine,
            session.optimizer,
            session.reference,
            None if critic is None else critic.engine,
            None if critic is None else critic.optimizer,
            loss_fn.mu_schedule if isinstance(loss_fn, MixLossFn) else None,
        )

    def _save(self) -> None:
        done = self._done()
        facts: dict[str, float | int | str] = {
            "objective": self.config.objective,
            "scalar_head": int(self.config.scalar_head),
        }
        for name, value in (("held_out_before", self.before), ("held_out_after", self.after)):
            if value is not None:
                facts[name] = value
        folder, keep = self.folder / "checkpoints", self.config.run.keep_checkpoints
        checkpoint.save(folder, sum(done.values()), self._contents(), self.position, facts, keep)

    def _done(self) -> dict[str, int]:
        """Steps done in each phase."""
        names = [phase.name for phase in self.phases]
        before = self.phases[: names.index(self.position.phase)]
        return {**{phase.name: phase.steps for phase in before}, self.position.phase: self.position.step}

    def _evaluate(self) -> float:
        assert self.config.evaluation is not None
        return held_out_reward(self.session, self.config.evaluation.samples)

    def _fact(self, name: str) -> float | None:
        return float(self.facts[name]) if name in self.facts else None

    def _describe(self) -> None:
        sizes, engine = self.config.parallel, self.session.engine
        weights = sum(parameter.numel() for parameter in engine.bare.parameters())
        layout = f"TP {sizes.tensor} × CP {sizes.context} × PP {sizes.pipeline} × DP {engine.groups.dp_size}"
        rows = "packed" if self.config.batch.packing else "padded"
        parallel = ", sequence parallel" if sizes.sequence_parallel else ""
        self.log.say(f"{layout}{parallel}, {rows}, {self.config.run.dtype}, {weights:,} weights on this rank")


def _check_layout(config: TrainConfig, data: Datasets, world_size: int) -> None:
    ranks = data_parallel_size(config.parallel, world_size)
    batches = [
        (f"{name}.batch_size", section.batch_size)
        for name, section in (("warmup", config.warmup), ("sft", config.sft), ("distillation", config.distillation))
        if section is not None
    ]
    batches += [("preference.pairs", config.preference.pairs)] if config.preference else []
    if config.rl is not None:
        batches += [("rl.prompts / rl.updates", config.rl.prompts // config.rl.updates)]
        batches += [("rl.experts / rl.updates", config.rl.experts // config.rl.updates)]
    for name, size in batches:
        if size % ranks:
            raise ValueError(f"{name} = {size} does not divide by the {ranks} data parallel ranks")
    sizes, longest = config.parallel, data.longest(config.sampling.max_new_tokens)
    unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
    needed = -(-longest // unit) * unit + (unit * sizes.tensor if config.batch.packing else 0)
    if needed > config.model.max_positions:
        raise ValueError(
            f"model.max_positions = {config.model.max_positions} is too few; the longest sequence takes {needed} with padding"
        )
