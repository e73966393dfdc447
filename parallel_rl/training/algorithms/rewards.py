"""Rewards of completions by the run's reward function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_rl.cluster.heartbeat import tick
from parallel_rl.experience.rewards import reward_function, score_once
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.session import Session


def completion_rewards(session: Session, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]]) -> Tensor:
    """[N] float64 rewards of one completion of each prompt; every rank calls it, N may be 0.

    Raises:
        ValueError: the reward function failed on some rank; on all ranks.
    """
    engine = session.engine
    texts = [session.tokenizer.decode(completion) for completion in completions]

    def ask() -> Tensor:
        tick("asking the reward function")
        reward = engine.config.reward
        if isinstance(reward, str):
            return _score(reward, prompts, texts)
        scores = torch.zeros(len(texts), dtype=torch.float64)
        for source, name in reward.items():
            rows = [row for row, prompt in enumerate(prompts) if prompt.source == source]
            if rows:
                scores[rows] = _score(name, [prompts[row] for row in rows], [texts[row] for row in rows])
        return scores

    rewards = score_once(ask, len(texts), engine.replica_groups, engine.groups.data)
    tick("the step's numbers")
    return rewards


def _score(reward: str, prompts: Sequence[Prompt], completions: Sequence[str]) -> Tensor:
    questions, answers = [prompt.text for prompt in prompts], [prompt.answer for prompt in prompts]
    return reward_function(reward)(questions, completions, answers, [prompt.extra for prompt in prompts])
