"""Rewards of completions of the held-out prompts: their mean, and pass@k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.experience.pass_at_k import evaluation_metrics
from parallel_rl.groups import group_size, mean_over_ranks
from parallel_rl.training.algorithms.rewards import completion_rewards
from parallel_rl.training.config.sections import EvaluationConfig
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.rollouts.sampler import ROWS_AT_A_TIME, sample
from parallel_rl.training.session import Session


@dataclass(frozen=True)
class Evaluation:
    """The mean reward of all completions, and further metrics by name, equal on every rank."""

    reward: float
    metrics: Mapping[str, float]


def evaluate(session: Session, config: EvaluationConfig) -> Evaluation:
    """Scores `samples` completions of each held-out prompt; the draws are the same ones every time."""
    engine, prompts, samples = session.engine, session.data.held_out, config.samples
    count, groups = len(prompts) * samples, engine.groups
    mine = range(groups.dp_rank * count // groups.dp_size, (groups.dp_rank + 1) * count // groups.dp_size)
    size, most, rewards = ROWS_AT_A_TIME * groups.cp_size, -(-count // groups.dp_size), []
    for first in range(0, most, size):  # as often on every rank
        ids = mine[first : first + size]
        chosen = raise_on_all_ranks(partial(_each, prompts, [index // samples for index in ids]))
        rewards.append(completion_rewards(session, chosen, _draw(session, chosen, ids)))
    local = torch.cat(rewards)
    whole = torch.zeros(count, dtype=torch.float64, device=engine.device)
    whole[mine.start : mine.stop] = local.to(engine.device)
    if group_size(groups.data) > 1:
        dist.all_reduce(whole, group=groups.data)
    metrics = evaluation_metrics(whole.cpu().view(-1, samples), [None] * len(prompts), config.passing)
    return Evaluation(mean_over_ranks(local, groups.data, engine.device), metrics)


def _draw(session: Session, prompts: Sequence[Prompt], ids: Sequence[int]) -> list[list[int]]:
    engine, tokens = session.engine, [prompt.tokens for prompt in prompts]
    seed = 2 * engine.config.run.seed + 1  # even seeds are training's
    return sample(engine, tokens, ids, seed, engine.config.sampling).responses() if tokens else []


def _each(prompts: Records[Prompt], indices: Sequence[int]) -> list[Prompt]:
    return [prompts[index] for index in indices]
