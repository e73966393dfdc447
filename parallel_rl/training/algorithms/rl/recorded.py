"""Experience that is not sampled now: recorded rollouts, and demonstrations added to the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.experience import Experience, padded_samples
from parallel_rl.training.batching.micro_batches import local_shares, target_rows
from parallel_rl.training.batching.own_fields import with_own_fields
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.data.datasets import check_cut
from parallel_rl.training.data.examples import Rollout
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session

_EXPERTS = 1 << 48  # above the ids of all samples of a run


def recorded_experience(session: Session, config: RLConfig, at: TrainProgress) -> tuple[Experience, float | None]:
    """Read this data rank's next recorded rollouts, and their mean reward unless they have advantages."""
    engine, records = session.engine, session.data.rollouts
    first, count = at.next("rollouts"), config.prompts * config.group_size
    batch = raise_on_all_ranks(partial(_read, records, first, count))
    indices = local_shares(count, config.updates, engine.groups)
    mine = [batch[index] for index in indices]
    starts = [len(record.tokens) - len(record.logprobs) for record in mine]
    samples = padded_samples(
        [record.tokens[:start] for record, start in zip(mine, starts, strict=True)],
        [record.tokens[start:] for record, start in zip(mine, starts, strict=True)],
        logprobs=[record.logprobs for record in mine],
        masks=[record.mask for record in mine],
        dtype=engine.float_dtype,
    )
    keep = torch.tensor([record.sample_mask != 0 for record in batch])
    groups, ids = [record.group for record in mine], [first + index for index in indices]
    made = Experience.of(samples).with_fields(group_ids=_ids(groups), sample_ids=_ids(ids), sample_mask=keep[indices])
    if "run_ids" in config.recorded_fields:
        made = made.with_fields(run_ids=_ids([record.run or 0 for record in mine]))
    own = [record.own for record in mine]
    made = with_own_fields(made, own, engine.config.own_fields("rollouts"), engine.float_dtype)
    if any(record.segments is not None for record in batch):
        made = _with_turns(made, mine)
    if batch[0].reward is None:
        advantages = torch.tensor([float(record.advantage or 0.0) for record in mine], dtype=engine.float_dtype)
        return replace(made, advantages=made.token_mask * advantages[:, None]), None
    rewards = torch.tensor([float(record.reward or 0.0) for record in batch], dtype=torch.float64)
    return replace(made, rewards=rewards[indices].to(engine.float_dtype)), float(rewards[keep].mean())


def _with_turns(made: Experience, records: Sequence[Rollout]) -> Experience:
    """Add the turn of each token; tokens of the environment carry no loss."""
    turns = torch.zeros_like(made.input_ids)
    for row, record in enumerate(records):
        if record.segments is not None:
            end = len(record.tokens)
            turns[row, end - len(record.segments) : end] = torch.tensor(record.segments)
    return made.with_fields(token_mask=made.token_mask & (turns >= 0), segment_ids=turns)


def demonstrations(session: Session, config: RLConfig, at: TrainProgress) -> Experience:
    """Read this data rank's next demonstrations, ordered by update."""
    first, groups = at.next("examples"), session.engine.groups
    positions = [first + position for position in local_shares(config.experts, config.updates, groups)]
    examples = session.data.read(session.data.examples, positions)
    samples = target_rows([example.prompt for example in examples], [example.target for example in examples])
    ids = torch.tensor([_EXPERTS + position for position in positions])
    return Experience.of(samples).with_fields(sample_ids=ids, expert_mask=torch.ones(len(positions), dtype=torch.bool))


def _ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _read(records: Records[Rollout], first: int, count: int) -> list[Rollout]:
    check_cut(records, first % len(records), count)
    return [records[place % len(records)] for place in range(first, first + count)]
