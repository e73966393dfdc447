"""One step of each objective: which sequences, what the loss needs beside them, and the optimizer steps on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from parallel_rl.advantages.grpo import group_relative_advantages
from parallel_rl.losses import ClippedPGLossFn, DPOLossFn, NLLLoss
from parallel_rl.losses.base import LossFn
from parallel_rl.megatron import is_last_stage
from parallel_rl.training.batching import MicroBatch, Rows, make_rows, micro_batches, share, spread, width_unit
from parallel_rl.training.config import DPOConfig, GRPOConfig, OptimizerConfig, SupervisedConfig
from parallel_rl.training.data import Prompt, Rollout, write_rollouts
from parallel_rl.training.datasets import Datasets, take
from parallel_rl.training.engine import Engine, StepResult, log_probs, train_step
from parallel_rl.training.rewards import checker
from parallel_rl.training.rollout import Samples, sample
from parallel_rl.training.schedule import learning_rate
from parallel_rl.training.tokenizer import CharTokenizer

Numbers = dict[str, float]


@dataclass(frozen=True)
class Session:
    """What the steps of a run share. `reference` is the frozen policy, where the objective has one."""

    engine: Engine
    tokenizer: CharTokenizer
    data: Datasets
    optimizer: MegatronOptimizer
    reference: torch.nn.Module | None = None

    def batches(self, rows: Rows) -> list[MicroBatch]:
        config, sizes = self.engine.config, self.engine.config.parallel
        unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
        size, packing = config.batch.micro_batch_size, config.batch.packing
        return micro_batches(rows, size, packing=packing, unit=unit, device=self.engine.device)

    def update(self, rows: Rows, loss_fn: LossFn, optimizer: OptimizerConfig, done: int, total: int) -> StepResult:
        """One optimizer step on this data rank's rows; `done` of `total` were made in this phase before."""
        rate = learning_rate(optimizer, done, total)
        return train_step(self.engine, self.optimizer, self.batches(rows), loss_fn, lr=rate, clip=optimizer.clip)

    def log_probs(self, model: torch.nn.Module, rows: Rows, temperature: float = 1.0) -> Tensor:
        """[N, S] log-probs of this data rank's rows."""
        width = rows.fields["input_ids"].shape[1]
        found = log_probs(self.engine, model, self.batches(rows), temperature)
        fitted = [torch.nn.functional.pad(part, (0, max(0, width - part.shape[1])))[:, :width] for part in found]
        return torch.cat(fitted).cpu()

    def local(self, items: Sequence[int]) -> list[int]:
        """This data rank's share of a list that every rank knows."""
        return list(items[share(len(items), self.engine.groups.dp_rank, self.engine.groups.dp_size)])


def supervised_step(session: Session, config: SupervisedConfig, step: int) -> Numbers:
    """NLL on the next `batch_size` examples."""
    engine, examples = session.engine, session.data.examples
    chosen = session.local(take(len(examples), step * config.batch_size, config.batch_size, engine.config.run.seed))
    rows = make_rows([(examples[index].prompt, examples[index].completion) for index in chosen], engine.numbers)
    loss_fn = NLLLoss(vocab_size=engine.vocab_size, consume_logits=True)
    return _numbers([session.update(rows, loss_fn, config.optimizer, step, config.steps)])


def dpo_step(session: Session, config: DPOConfig, step: int) -> Numbers:
    """DPO on the next `pairs` pairs; the rows are (chosen, rejected), (chosen, rejected), ..."""
    engine, pairs = session.engine, session.data.pairs
    chosen = [
        pairs[index]
        for index in session.local(take(len(pairs), step * config.pairs, config.pairs, engine.config.run.seed))
    ]
    rows = make_rows([(pair.prompt, side) for pair in chosen for side in (pair.chosen, pair.rejected)], engine.numbers)
    assert session.reference is not None
    rows = rows.with_fields(reference_policy_logprobs=session.log_probs(session.reference, rows))
    loss_fn = DPOLossFn(config.loss, vocab_size=engine.vocab_size, consume_logits=True)
    return _numbers([session.update(rows, loss_fn, config.optimizer, step, config.steps)])


def grpo_step(session: Session, config: GRPOConfig, step: int) -> Numbers:
    """GRPO on fresh samples or on the next recorded rollouts; `updates` optimizer steps, each on its share of the prompts."""
    engine, temperature = session.engine, session.engine.config.sampling.temperature
    rows, reward = _recorded(session, config, step) if session.data.rollouts else _sampled(session, config, step)
    prev = rows.fields["generation_logprobs"]
    if config.prev_logprobs == "recompute" and not config.loss.force_on_policy_ratio:  # which reads none
        prev = session.log_probs(engine.model, rows, temperature)
    rows = rows.with_fields(prev_logprobs=prev)
    if session.reference is not None:
        rows = rows.with_fields(reference_policy_logprobs=session.log_probs(session.reference, rows, temperature))
    loss_fn = ClippedPGLossFn(config.loss, vocab_size=engine.vocab_size, temperature=temperature, consume_logits=True)
    size, total = len(rows) // config.updates, config.steps * config.updates
    parts = [rows.take(slice(index * size, (index + 1) * size)) for index in range(config.updates)]
    done = step * config.updates
    results = [session.update(part, loss_fn, config.optimizer, done + index, total) for index, part in enumerate(parts)]
    return {**_numbers(results), **({} if reward is None else {"reward": reward})}


def held_out_reward(session: Session, samples: int) -> float:
    """Mean reward of `samples` completions of each held-out prompt; the draws are the same ones every time."""
    engine, prompts = session.engine, session.data.held_out
    count, groups = len(prompts) * samples, session.engine.groups
    mine = range(groups.dp_rank * count // groups.dp_size, (groups.dp_rank + 1) * count // groups.dp_size)
    rewards = torch.zeros(0)
    if len(mine):
        chosen = [prompts[index // samples] for index in mine]
        seed = 2 * engine.config.run.seed + 1  # even seeds are training's
        drawn = sample(engine, [prompt.tokens for prompt in chosen], list(mine), seed, engine.config.sampling)
        rewards = _rewards(session, chosen, drawn)
    return _mean(engine, rewards)


def _sampled(session: Session, config: GRPOConfig, step: int) -> tuple[Rows, float]:
    engine, prompts, size = session.engine, session.data.train, config.group_size
    order = take(len(prompts), step * config.prompts, config.prompts, engine.config.run.seed)
    # A group stays on one data rank, and each update has the same prompts in every layout.
    places = [place for part in _split(range(config.prompts), config.updates) for place in session.local(part)]
    chosen = [prompts[order[place]] for place in places for _ in range(size)]
    ids = [(step * config.prompts + place) * size + index for place in places for index in range(size)]
    drawn = sample(
        engine, [prompt.tokens for prompt in chosen], ids, 2 * engine.config.run.seed, engine.config.sampling
    )
    rewards = _rewards(session, chosen, drawn)
    groups = torch.tensor(places).repeat_interleave(size)
    advantages = group_relative_advantages(rewards, groups, config.advantages)
    if config.record:
        _record(engine, drawn, [step * config.prompts + int(group) for group in groups], rewards.tolist(), step)
    column = torch.arange(drawn.tokens.shape[1])
    mask = (column >= drawn.prompt_lengths[:, None]) & (column < drawn.lengths[:, None])
    fields = {
        "input_ids": drawn.tokens,
        "token_mask": mask.to(engine.numbers),
        "sample_mask": torch.ones(len(ids), dtype=engine.numbers),
        "generation_logprobs": drawn.logprobs,
        "advantages": (mask * advantages[:, None]).to(engine.numbers),
        "rewards": rewards.to(engine.numbers),
    }
    return Rows(fields, drawn.lengths), _mean(engine, rewards)


def _record(engine: Engine, drawn: Samples, groups: Sequence[int], rewards: Sequence[float], step: int) -> None:
    """One file a step and data rank, so that a step that is done again after a resume replaces its own."""
    where = engine.groups
    if where.tp_rank or where.cp_rank or not is_last_stage():
        return
    rows = zip(
        drawn.tokens.tolist(),
        drawn.logprobs.tolist(),
        drawn.prompt_lengths.tolist(),
        drawn.lengths.tolist(),
        strict=True,
    )
    rollouts = [
        Rollout(tuple(tokens[:end]), tuple(round(x, 12) for x in logprobs[start:end]), group, reward, None)
        for (tokens, logprobs, start, end), group, reward in zip(rows, groups, rewards, strict=True)
    ]
    write_rollouts(Path(engine.config.run.dir) / "rollouts" / f"step_{step + 1:06d}_{where.dp_rank}.jsonl", rollouts)


def _recorded(session: Session, config: GRPOConfig, step: int) -> tuple[Rows, float | None]:
    engine, records = session.engine, session.data.rollouts
    count = config.prompts * config.group_size
    batch = [records[place % len(records)] for place in range(step * count, (step + 1) * count)]
    reward: float | None = None
    if batch[0].reward is None:
        advantages = torch.tensor([float(record.advantage or 0.0) for record in batch], dtype=torch.float64)
    else:
        rewards = torch.tensor([float(record.reward or 0.0) for record in batch], dtype=torch.float64)
        reward = float(rewards.mean())
        advantages = group_relative_advantages(
            rewards, torch.tensor([record.group for record in batch]), config.advantages
        )
    places = [place for part in _split(range(count), config.updates) for place in session.local(part)]
    mine = [batch[place] for place in places]
    starts = [len(record.tokens) - len(record.logprobs) for record in mine]
    rows = make_rows(
        [(record.tokens[:start], record.tokens[start:]) for record, start in zip(mine, starts, strict=True)],
        engine.numbers,
    )
    fields = {
        "generation_logprobs": spread(
            [record.logprobs for record in mine], starts, rows.fields["input_ids"].shape[1], engine.numbers
        ),
        "advantages": (rows.fields["token_mask"] * advantages[places][:, None]).to(engine.numbers),
    }
    if reward is not None:
        fields["rewards"] = torch.tensor([float(record.reward or 0.0) for record in mine], dtype=engine.numbers)
    return rows.with_fields(**fields), reward


def _rewards(session: Session, prompts: Sequence[Prompt], drawn: Samples) -> Tensor:
    check = checker(session.engine.config.reward)
    texts = [session.tokenizer.decode(completion) for completion in drawn.completions()]
    values = [check(prompt.text, text, prompt.answer) for prompt, text in zip(prompts, texts, strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def _mean(engine: Engine, values: Tensor) -> float:
    """The mean over data ranks."""
    total = torch.tensor([float(values.sum()), float(values.numel())], dtype=torch.float64, device=engine.device)
    dist.all_reduce(total, group=engine.groups.data)
    return float(total[0] / total[1])


def _split(items: range, parts: int) -> list[range]:
    size = len(items) // parts
    return [items[index * size : (index + 1) * size] for index in range(parts)]


def _numbers(results: Sequence[StepResult]) -> Numbers:
    """The updates of one step as one row: extrema stay extrema, everything else is their mean."""
    row: Numbers = {}
    for name in results[0].metrics:
        values = [result.metrics[name] for result in results]
        ends = {"_min": min, "_max": max}
        row[name] = next(
            (pick(values) for suffix, pick in ends.items() if name.endswith(suffix)), sum(values) / len(values)
        )
    row["grad_norm"] = sum(result.grad_norm for result in results) / len(results)
    row["tokens"] = float(sum(result.tokens for result in results))
    return row
