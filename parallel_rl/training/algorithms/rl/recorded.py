"""The rows of an RL step that are not drawn now: recorded rollouts, and demonstrations beside the samples."""

from __future__ import annotations

from functools import partial

import torch

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.training.batching.micro_batches import Rows, local_shares, make_rows, spread
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.data.datasets import check_cut
from parallel_rl.training.data.examples import Rollout
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.session import Session

_EXPERTS = 1 << 48  # behind the ids of all samples of a run


def recorded_rows(session: Session, config: RLConfig, at: TrainProgress) -> tuple[Rows, float | None]:
    """This data rank's part of the next recorded rollouts; the mean reward, unless the file has advantages in its place."""
    engine, records = session.engine, session.data.rollouts
    first, count = at.next("rollouts"), config.prompts * config.group_size
    batch = raise_on_all_ranks(partial(_recorded, records, first, count))
    places = local_shares(count, config.updates, engine.groups)
    mine = [batch[place] for place in places]
    starts = [len(record.tokens) - len(record.logprobs) for record in mine]
    pairs = [(record.tokens[:start], record.tokens[start:]) for record, start in zip(mine, starts, strict=True)]
    rows = make_rows(pairs, engine.float_dtype)
    width = rows.fields["input_ids"].shape[1]
    fields = {
        "generation_logprobs": spread([record.logprobs for record in mine], starts, width, engine.float_dtype),
        "group_ids": torch.tensor([record.group for record in mine]),
        "sample_ids": torch.tensor([first + place for place in places]),
    }
    if batch[0].reward is None:
        advantages = torch.tensor([float(record.advantage or 0.0) for record in mine], dtype=engine.float_dtype)
        return rows.with_fields(**fields, advantages=rows.fields["token_mask"] * advantages[:, None]), None
    rewards = torch.tensor([float(record.reward or 0.0) for record in batch], dtype=torch.float64)
    rows = rows.with_fields(**fields, rewards=rewards[places].to(engine.float_dtype))
    return rows, float(rewards.mean())


def _recorded(records: Records[Rollout], first: int, count: int) -> list[Rollout]:
    check_cut(records, first % len(records), count)
    return [records[place % len(records)] for place in range(first, first + count)]


def expert_rows(session: Session, config: RLConfig, at: TrainProgress) -> Rows:
    """This data rank's part of the next demonstrations, each update's part in order."""
    engine, first = session.engine, at.next("examples")
    places = [first + place for place in local_shares(config.experts, config.updates, engine.groups)]
    chosen = session.data.read(session.data.examples, places)
    rows = make_rows([(example.prompt, example.completion) for example in chosen], engine.float_dtype)
    ids = torch.tensor([_EXPERTS + place for place in places])
    return rows.with_fields(expert_mask=torch.ones(len(places), dtype=torch.bool), sample_ids=ids)
