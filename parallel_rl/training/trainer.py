"""A run from its config to its last checkpoint: warm-up, reference, objective, evaluation."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
import yaml

from parallel_rl.training import checkpoint
from parallel_rl.training.batching import width_unit
from parallel_rl.training.checkpoint import Position
from parallel_rl.training.config import OptimizerConfig, TrainConfig, data_parallel_size
from parallel_rl.training.datasets import Datasets, read_datasets
from parallel_rl.training.engine import build_engine, build_optimizer, freeze_copy, start_world
from parallel_rl.training.load import as_mapping
from parallel_rl.training.logging import RunLog, read_metrics
from parallel_rl.training.plot import draw_curves
from parallel_rl.training.rewards import checker
from parallel_rl.training.steps import Numbers, Session, dpo_step, grpo_step, held_out_reward, supervised_step
from parallel_rl.training.tokenizer import CharTokenizer


@dataclass(frozen=True)
class Result:
    """What a run leaves behind, equal on every rank: its rows, the mean held-out reward before and after (None: no evaluation)
    and how long it took."""

    rows: list[dict[str, float | int | str]]
    held_out_before: float | None
    held_out_after: float | None
    seconds: float


@dataclass(frozen=True)
class _Phase:
    name: str
    steps: int
    optimizer: OptimizerConfig
    run: Callable[[Session, int], Numbers]
    is_main: bool


def train(config: TrainConfig) -> Result:
    """Runs `config` to its end on every rank of the world, or from the newest checkpoint in its folder on.

    Raises:
        ValueError: anything in the config, the data or the world's size that does not fit; on every rank, before any work.
    """
    began = time.monotonic()
    tokenizer = CharTokenizer(config.tokenizer.alphabet)
    data = read_datasets(config, tokenizer)
    checker(config.reward)
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
        self.phases = _phases(config)
        self.first = dist.get_rank() == 0
        if config.run.resume == "never" and self.first:
            recorded = ("rollouts",) if config.grpo is not None and config.grpo.record else ()
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
            engine = self.session.engine
            checkpoint.load(Path(self.config.run.init_from), engine, None, None)
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

    def _step(self, phase: _Phase) -> None:
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

    def _enter_main(self, phase: _Phase) -> None:
        """Fresh moments, the reference copied, the first evaluation, and a checkpoint to start again from."""
        engine = self.session.engine
        reference = freeze_copy(engine) if _needs_reference(self.config) else None
        self.session = replace(self.session, optimizer=build_optimizer(engine, phase.optimizer), reference=reference)
        if self.config.evaluation is not None and self.before is None:
            self.before = self._evaluate()
            self.log.say(
                f"held-out reward {'after the warm-up' if self.config.warmup else 'before'}: {self.before:.3f}"
            )
        if self.rows:
            self._save()

    def _restore(self, path: Path) -> None:
        engine, phase = self.session.engine, next(p for p in self.phases if p.name == self.position.phase)
        reference = (
            freeze_copy(engine) if phase.is_main and self.position.step and _needs_reference(self.config) else None
        )
        optimizer = build_optimizer(engine, phase.optimizer)
        checkpoint.load(path, engine, optimizer if self.position.step else None, reference)
        if not self.position.step:
            optimizer = build_optimizer(engine, phase.optimizer)  # master weights of what was just loaded
        self.session = replace(self.session, optimizer=optimizer, reference=reference)
        self.log.say(f"continuing from {path}: {self.position.phase} step {self.position.step}")

    def _save(self) -> None:
        done = self._done()
        facts: dict[str, float | int | str] = {"objective": self.config.objective}
        for name, value in (("held_out_before", self.before), ("held_out_after", self.after)):
            if value is not None:
                facts[name] = value
        session, keep = self.session, self.config.run.keep_checkpoints
        optimizer, reference = (session.optimizer, session.reference) if self.position.step else (None, None)
        folder = self.folder / "checkpoints"
        checkpoint.save(folder, sum(done.values()), session.engine, optimizer, reference, self.position, facts, keep)

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


def _phases(config: TrainConfig) -> list[_Phase]:
    phases = []
    warmup, grpo, dpo, sft = config.warmup, config.grpo, config.dpo, config.sft
    if warmup is not None:
        phases.append(
            _Phase("warmup", warmup.steps, warmup.optimizer, lambda s, i: supervised_step(s, warmup, i), False)
        )
    if grpo is not None:
        phases.append(_Phase("grpo", grpo.steps, grpo.optimizer, lambda s, i: grpo_step(s, grpo, i), True))
    if dpo is not None:
        phases.append(_Phase("dpo", dpo.steps, dpo.optimizer, lambda s, i: dpo_step(s, dpo, i), True))
    if sft is not None:
        phases.append(_Phase("sft", sft.steps, sft.optimizer, lambda s, i: supervised_step(s, sft, i), True))
    return phases


def _needs_reference(config: TrainConfig) -> bool:
    return config.dpo is not None or (config.grpo is not None and config.grpo.loss.kl_in_loss)


def _check_layout(config: TrainConfig, data: Datasets, world_size: int) -> None:
    ranks = data_parallel_size(config.parallel, world_size)
    batches = [("warmup.batch_size", config.warmup.batch_size)] if config.warmup else []
    batches += [("sft.batch_size", config.sft.batch_size)] if config.sft else []
    batches += [("dpo.pairs", config.dpo.pairs)] if config.dpo else []
    batches += [("grpo.prompts / grpo.updates", config.grpo.prompts // config.grpo.updates)] if config.grpo else []
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
