"""Rewards of completions by the run's reward function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from parallel_rl.cluster.heartbeat import tick
from parallel_rl.experience.http_reward import HTTPRewardConfig
from parallel_rl.experience.rewards import reward_function, score_once
from parallel_rl.experience.workers import Workers
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.rollouts.sharing import Sharing, failure
from parallel_rl.training.session import Session


def completion_rewards(session: Session, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]]) -> Tensor:
    """[N] float64 rewards of one completion of each prompt; every rank calls it, N may be 0.

    While servers are asked, ranks look at each other, so that no collective runs into its timeout; Python has the main thread.

    Raises:
        ValueError, RuntimeError: the reward function failed on some rank; on all ranks. Unavailable: its server is away.
    """
    engine, sharing = session.engine, Sharing(session.engine)
    texts = [session.tokenizer.decode(completion) for completion in completions]
    parts = [
        (reward, [row for row, prompt in enumerate(prompts) if source in (None, prompt.source)])
        for source, reward in engine.config.rewards.items()
    ]

    def score(reward: str | HTTPRewardConfig, rows: Sequence[int]) -> Tensor:
        return _score(reward, [prompts[row] for row in rows], [texts[row] for row in rows])

    tick("asking the reward function")
    well, served = True, [number for number, (reward, _) in enumerate(parts) if isinstance(reward, HTTPRewardConfig)]
    asked = {number: Workers(1).submit(partial(score, *parts[number])) for number in served if sharing.asks}
    if served:
        well = sharing.wait([*asked.values()])

    def ask() -> Tensor:
        scores = torch.zeros(len(texts), dtype=torch.float64)
        for number, (reward, rows) in enumerate(parts):
            if number not in asked and rows:
                scores[rows] = score(reward, rows)
            elif number in asked and (well or failure(asked[number])):
                scores[rows] = asked[number].result()
        return scores

    rewards = score_once(ask, len(texts), engine.replica_groups, engine.groups.data)
    tick("the step's numbers")
    return rewards


def _score(reward: str | HTTPRewardConfig, prompts: Sequence[Prompt], completions: Sequence[str]) -> Tensor:
    questions, answers = [prompt.text for prompt in prompts], [prompt.answer for prompt in prompts]
    return reward_function(reward)(questions, completions, answers, [prompt.extra for prompt in prompts])
