"""Rewards of completions by the run's reward function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.cluster.progress import tick
from parallel_rl.experience.failures import FailedSamplesConfig, score_again
from parallel_rl.experience.rewards import RewardTimeout, reward_function, score_once
from parallel_rl.losses.core.requirements import Field
from parallel_rl.servers.http_client import Workers
from parallel_rl.servers.http_reward import HTTPRewardConfig, Scored
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.data.format import UserValues, read_user_values
from parallel_rl.training.rollouts.sharing import Sharing, failure
from parallel_rl.training.session import Session


class CompletionRewards(NamedTuple):
    """Rewards [N] in float64, NaN for failed samples; `timed_out` [N] marks those over the time limit.

    `field_values` are of the loss's fields: 0 on ranks that do not score, and for failed samples.
    """

    values: Tensor
    timed_out: Tensor
    field_values: list[UserValues]


def completion_rewards(
    session: Session,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[int]],
    fields: Sequence[Field] = (),
) -> CompletionRewards:
    """Score one completion of each prompt and read `fields`; every rank calls it, N may be 0.

    A sample that still fails after the retries is NaN, and its message goes to `session.failures`. Ranks poll each
    other while servers work, so no collective times out. On all ranks, ValueError or RuntimeError if the reward
    function failed on one, Unavailable if its server is away.
    """
    engine, sharing, config = session.engine, Sharing(session.engine), session.failures.config
    texts = [session.tokenizer.decode(completion) for completion in completions]
    parts = [
        (reward, [row for row, prompt in enumerate(prompts) if source in (None, prompt.source)])
        for source, reward in engine.config.rewards.items()
    ]

    field_values: list[UserValues] = [
        tuple(0 if field.per == "sequence" else (0,) * len(completion) for field in fields)
        for completion in completions
    ]

    def score(reward: str | HTTPRewardConfig, rows: Sequence[int]) -> tuple[Scored, dict[int, UserValues]]:
        of_rows = [prompts[row] for row in rows], [texts[row] for row in rows], [completions[row] for row in rows]
        return _score(reward, *of_rows, fields, config)

    tick("asking the reward function")
    well, served = True, [number for number, (reward, _) in enumerate(parts) if isinstance(reward, HTTPRewardConfig)]
    pending = {number: Workers(1).submit(partial(score, *parts[number])) for number in served if sharing.asks}
    if served:
        well = sharing.wait([*pending.values()])

    def ask() -> Tensor:
        scores, timed_out = torch.zeros(2, len(texts), dtype=torch.float64)
        for number, (reward, rows) in enumerate(parts):
            if number not in pending and rows:
                scored, values = score(reward, rows)
            elif number in pending and (well or failure(pending[number])):
                scored, values = pending[number].result()
            else:
                continue
            scores[rows] = scored.rewards
            for row, value in values.items():
                field_values[rows[row]] = value
            late = [row for row, fault in scored.faults.items() if isinstance(fault, RewardTimeout)]
            timed_out[[rows[row] for row in late]] = 1
            for cause, failed in (("timeout", {*late}), ("reward", {*scored.faults}.difference(late))):
                for row in sorted(failed)[:1]:
                    session.failures.report(cause, str(scored.faults[row]))
        return torch.cat([scores, timed_out])

    scores, timed_out = score_once(ask, 2 * len(texts), engine.replica_groups, engine.groups.data).view(2, -1)
    tick("the step's numbers")
    return CompletionRewards(scores, timed_out > 0, field_values)


def _score(
    reward: str | HTTPRewardConfig,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    tokens: Sequence[Sequence[int]],
    fields: Sequence[Field],
    config: FailedSamplesConfig,
) -> tuple[Scored, dict[int, UserValues]]:
    """Score completions, and read `fields` of those that do not fail."""
    function, field_values = reward_function(reward, config.timeout), dict[int, UserValues]()
    # a server takes ids only to return values of tokens
    sends_tokens = not isinstance(reward, HTTPRewardConfig) or any(field.per == "token" for field in fields)

    def score(rows: Sequence[int]) -> Scored:
        of_rows = [prompts[row] for row in rows]
        questions, answers = [prompt.text for prompt in of_rows], [prompt.answer for prompt in of_rows]
        ids, extras = [tokens[row] for row in rows] if sends_tokens else None, [prompt.extra for prompt in of_rows]
        scored = function.score(questions, [completions[row] for row in rows], answers, extras, ids)
        faults = dict(scored.faults)
        for place, row in enumerate(rows):
            if place in faults or not fields:
                continue
            try:
                field_values[row] = read_user_values(_plain(scored.fields[place]), fields, len(tokens[row]), _TOKENS)
            except ValueError as error:
                name = reward.url if isinstance(reward, HTTPRewardConfig) else repr(reward)
                faults[place] = ValueError(f"reward {name} of sample {place}: {error}. {_FORM}")
                scored.rewards[place] = math.nan
        return Scored(scored.rewards, faults)

    return score_again(score, len(prompts), config.retries), field_values


_TOKENS = "tokens of the completion, its end token included"
_FORM = "It must return {'reward': number, ...} with each field that the loss declares"


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """Convert tensors, arrays and tuples to numbers and lists."""
    listed = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in listed.items()}
