"""Rewards of completions by the run's reward function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from parallel_rl.cluster.heartbeat import tick
from parallel_rl.experience.failures import score_again
from parallel_rl.experience.rewards import reward_function, score_once
from parallel_rl.servers.http_reward import HTTPRewardConfig, Scored
from parallel_rl.servers.workers import Workers
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.rollouts.sharing import Sharing, failure
from parallel_rl.training.session import Session


def completion_rewards(session: Session, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]]) -> Tensor:
    """Score one completion of each prompt, [N] float64; every rank calls it, N may be 0.

    A sample that still fails after `session.failures.config.retries` retries is NaN, and its message goes to
    `session.failures`. Ranks poll each other while servers work, so no collective times out.

    Raises:
        ValueError, RuntimeError: the reward function failed on some rank; on all ranks. Unavailable: its server is away.
    """
    engine, sharing, retries = session.engine, Sharing(session.engine), session.failures.config.retries
    texts = [session.tokenizer.decode(completion) for completion in completions]
    parts = [
        (reward, [row for row, prompt in enumerate(prompts) if source in (None, prompt.source)])
        for source, reward in engine.config.rewards.items()
    ]

    def score(reward: str | HTTPRewardConfig, rows: Sequence[int]) -> Scored:
        return _score(reward, [prompts[row] for row in rows], [texts[row] for row in rows], retries)

    tick("asking the reward function")
    well, served = True, [number for number, (reward, _) in enumerate(parts) if isinstance(reward, HTTPRewardConfig)]
    pending = {number: Workers(1).submit(partial(score, *parts[number])) for number in served if sharing.asks}
    if served:
        well = sharing.wait([*pending.values()])

    def ask() -> Tensor:
        scores = torch.zeros(len(texts), dtype=torch.float64)
        for number, (reward, rows) in enumerate(parts):
            if number not in pending and rows:
                scored = score(reward, rows)
            elif number in pending and (well or failure(pending[number])):
                scored = pending[number].result()
            else:
                continue
            scores[rows] = scored.rewards
            for row in sorted(scored.faults)[:1]:
                session.failures.report("reward", str(scored.faults[row]))
        return scores

    rewards = score_once(ask, len(texts), engine.replica_groups, engine.groups.data)
    tick("the step's numbers")
    return rewards


def _score(
    reward: str | HTTPRewardConfig, prompts: Sequence[Prompt], completions: Sequence[str], retries: int
) -> Scored:
    function = reward_function(reward)

    def score(rows: Sequence[int]) -> Scored:
        of_source = [prompts[row] for row in rows]
        questions, answers = [prompt.text for prompt in of_source], [prompt.answer for prompt in of_source]
        return function.score(
            questions, [completions[row] for row in rows], answers, [prompt.extra for prompt in of_source]
        )

    return score_again(score, len(prompts), retries)
