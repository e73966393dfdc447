"""Rewards of completions by the run's reward function."""

from __future__ import annotations

from collections.abc import Sequence

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
    score = reward_function(engine.config.reward)
    texts = [session.tokenizer.decode(completion) for completion in completions]
    questions, answers = [prompt.text for prompt in prompts], [prompt.answer for prompt in prompts]

    def ask() -> Tensor:
        tick("asking the reward function")
        return score(questions, texts, answers)

    rewards = score_once(ask, len(texts), engine.replica_groups, engine.groups.data)
    tick("the step's numbers")
    return rewards
