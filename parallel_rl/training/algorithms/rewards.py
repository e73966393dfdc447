"""Rewards of completions by the run's reward function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.cluster.heartbeat import tick
from parallel_rl.experience.failures import FailedSamplesConfig, score_again
from parallel_rl.experience.rewards import RewardTimeout, reward_function, score_once
from parallel_rl.servers.http_reward import HTTPRewardConfig, Scored
from parallel_rl.servers.workers import Workers
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.rollouts.sharing import Sharing, failure
from parallel_rl.training.session import Session


class CompletionRewards(NamedTuple):
    """Rewards [N] float64, NaN for each sample that failed; `timed_out` marks those over the time limit."""

    values: Tensor
    timed_out: Tensor


def completion_rewards(
    session: Session, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]]
) -> CompletionRewards:
    """Score one completion of each prompt; every rank calls it, N may be 0.

    A sample that still fails after `session.failures.config.retries` retries is NaN, and its message goes to
    `session.failures`. Ranks poll each other while servers work, so no collective times out.

    Raises:
        ValueError, RuntimeError: the reward function failed on some rank; on all ranks. Unavailable: its server is away.
    """
    engine, sharing, config = session.engine, Sharing(session.engine), session.failures.config
    texts = [session.tokenizer.decode(completion) for completion in completions]
    parts = [
        (reward, [row for row, prompt in enumerate(prompts) if source in (None, prompt.source)])
        for source, reward in engine.config.rewards.items()
    ]

    def score(reward: str | HTTPRewardConfig, rows: Sequence[int]) -> Scored:
        return _score(reward, [prompts[row] for row in rows], [texts[row] for row in rows], config)

    tick("asking the reward function")
    well, served = True, [number for number, (reward, _) in enumerate(parts) if isinstance(reward, HTTPRewardConfig)]
    asked = {number: Workers(1).submit(partial(score, *parts[number])) for number in served if sharing.asks}
    if served:
        well = sharing.wait([*asked.values()])

    def ask() -> Tensor:
        scores, timed_out = torch.zeros(2, len(texts), dtype=torch.float64)
        for number, (reward, rows) in enumerate(parts):
            if number not in asked and rows:
                scored = score(reward, rows)
            elif number in asked and (well or failure(asked[number])):
                scored = asked[number].result()
            else:
                continue
            scores[rows] = scored.rewards
            late = [row for row, fault in scored.faults.items() if isinstance(fault, RewardTimeout)]
            timed_out[[rows[row] for row in late]] = 1
            for cause, failed in (("timeout", {*late}), ("reward", {*scored.faults}.difference(late))):
                for row in sorted(failed)[:1]:
                    session.failures.report(cause, str(scored.faults[row]))
        return torch.cat([scores, timed_out])

    scores, timed_out = score_once(ask, 2 * len(texts), engine.replica_groups, engine.groups.data).view(2, -1)
    tick("the step's numbers")
    return CompletionRewards(scores, timed_out > 0)


def _score(
    reward: str | HTTPRewardConfig,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    config: FailedSamplesConfig,
) -> Scored:
    function = reward_function(reward, config.timeout)

    def score(rows: Sequence[int]) -> Scored:
        asked = [prompts[row] for row in rows]
        questions, answers = [prompt.text for prompt in asked], [prompt.answer for prompt in asked]
        return function.score(
            questions, [completions[row] for row in rows], answers, [prompt.extra for prompt in asked]
        )

    return score_again(score, len(prompts), config.retries)
