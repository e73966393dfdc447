"""The mean reward on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.groups import mean_over_ranks
from parallel_rl.training.algorithms.rewards import completion_rewards
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.rollouts.sampler import ROWS_AT_A_TIME, sample
from parallel_rl.training.session import Session


def held_out_reward(session: Session, samples: int) -> float:
    """Mean reward of `samples` completions of each held-out prompt; the draws are the same ones every time."""
    engine, prompts = session.engine, session.data.held_out
    count, groups = len(prompts) * samples, session.engine.groups
    mine = range(groups.dp_rank * count // groups.dp_size, (groups.dp_rank + 1) * count // groups.dp_size)
    size, most, rewards = ROWS_AT_A_TIME * groups.cp_size, -(-count // groups.dp_size), []
    for first in range(0, most, size):  # as often on every rank
        ids = mine[first : first + size]
        chosen = raise_on_all_ranks(partial(_each, prompts, [index // samples for index in ids]))
        completions: list[list[int]] = []
        if chosen:
            seed = 2 * engine.config.run.seed + 1  # even seeds are training's
            drawn = sample(engine, [prompt.tokens for prompt in chosen], ids, seed, engine.config.sampling)
            completions = drawn.responses()
        rewards.append(completion_rewards(session, chosen, completions))
    return mean_over_ranks(torch.cat(rewards), groups.data, engine.device)


def _each(prompts: Records[Prompt], indices: Sequence[int]) -> list[Prompt]:
    return [prompts[index] for index in indices]
