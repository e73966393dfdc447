"""Mean reward and pass@k of completions of the held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallel_rl.agreement import gather_results, raise_on_all_ranks, sum_over_groups
from parallel_rl.experience.checkers import answer_text
from parallel_rl.experience.pass_at_k import evaluation_metrics
from parallel_rl.groups import mean_over_ranks
from parallel_rl.training.algorithms.rewards import completion_rewards
from parallel_rl.training.algorithms.shown import ShownSample
from parallel_rl.training.config.sections import EvaluationConfig
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.progress import TrainProgress
from parallel_rl.training.rollouts.sampler import ROWS_AT_A_TIME, sample
from parallel_rl.training.session import Session


@dataclass(frozen=True)
class Evaluation:
    """Mean reward of all completions, further metrics by name, and samples to show; equal on every rank."""

    reward: float
    metrics: Mapping[str, float]
    shown: Sequence[ShownSample] = ()


def evaluate(session: Session, config: EvaluationConfig, at: TrainProgress) -> Evaluation:
    """Score `samples` completions of each held-out prompt, with the same seeds every time.

    They come from the servers if these receive the trainer's weights (`server.update`), else from the trainer's sampler. A
    completion that cannot be scored has reward 0.

    Raises:
        ValueError: a server failed, or too many rewards failed; on every rank.
    """
    engine, prompts, samples = session.engine, session.data.held_out, config.samples
    count, groups = len(prompts) * samples, engine.groups
    mine = range(groups.dp_rank * count // groups.dp_size, (groups.dp_rank + 1) * count // groups.dp_size)
    size, most, rewards = ROWS_AT_A_TIME * groups.cp_size, -(-count // groups.dp_size), []
    shown: list[ShownSample] = []
    sources: dict[int, str | None] = {}  # this rank's prompts
    if session.served is not None:
        session.served.bring(engine.config.policy_version(at.step))
    for first in range(0, most, size):  # the same number of rounds on every rank
        ids = mine[first : first + size]
        chosen = raise_on_all_ranks(partial(_each, prompts, [index // samples for index in ids]))
        sources |= {index // samples: prompt.source for index, prompt in zip(ids, chosen, strict=True)}
        completions = _draw(session, chosen, ids)
        rewards.append(completion_rewards(session, chosen, completions))
        shown += _shown(session, config, ids, chosen, completions, rewards[-1].nan_to_num(0.0))
    local = torch.cat(rewards)
    session.failures.count(len(local), {"reward": local.isnan()}, groups.data, engine.replica_groups)
    failed = session.failures.metrics()["samples_failed/reward"]  # the counts of a step start at 0
    local = local.nan_to_num(0.0)
    own = torch.zeros(count, dtype=torch.float64)
    own[mine.start : mine.stop] = local
    whole = sum_over_groups(own, [groups.data])
    everywhere = {number: source for part in gather_results(lambda: sources) for number, source in part.items()}
    by_prompt = [everywhere[number] for number in range(len(prompts))]
    metrics = evaluation_metrics(whole.view(-1, samples), by_prompt, config.passing)
    metrics |= {"held_out_samples_failed/reward": failed}
    if config.show:
        found = {sample.number: sample for part in gather_results(lambda: shown) for sample in part}
        shown = [found[number] for number in sorted(found)]
    return Evaluation(mean_over_ranks(local, groups.data, engine.device), metrics, shown)


def _shown(
    session: Session,
    config: EvaluationConfig,
    ids: Sequence[int],
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[int]],
    rewards: Tensor,
) -> list[ShownSample]:
    """List the first completion of each of the first `show` prompts on this rank."""
    decode = session.tokenizer.decode
    return [
        ShownSample(index // config.samples + 1, prompt.text, decode(completion), answer_text(prompt.answer), reward)
        for index, prompt, completion, reward in zip(ids, prompts, completions, rewards.tolist(), strict=True)
        if index % config.samples == 0 and index // config.samples < config.show
    ]


def _draw(session: Session, prompts: Sequence[Prompt], ids: Sequence[int]) -> list[list[int]]:
    engine, tokens = session.engine, [prompt.tokens for prompt in prompts]
    seed = 2 * engine.config.run.seed + 1  # even seeds are used in training
    if session.served is not None and session.served.updated:
        drawn, *_, fault = session.served.draw(tokens, ids, seed)
        session.failures.report_unread(fault)
        return drawn.responses()
    return sample(engine, tokens, ids, seed, engine.config.sampling).responses() if tokens else []


def _each(prompts: Records[Prompt], indices: Sequence[int]) -> list[Prompt]:
    return [prompts[index] for index in indices]
