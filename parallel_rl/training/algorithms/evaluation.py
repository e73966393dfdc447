"""Rewards of completions of the held-out prompts: means, mean@k and pass@k, and the samples shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallel_rl.agreement import gather_results, raise_on_all_ranks, sum_over_groups
from parallel_rl.config.shown import printable
from parallel_rl.experience.checkers import answer_text
from parallel_rl.groups import mean_over_ranks
from parallel_rl.training.algorithms.rewards import completion_rewards
from parallel_rl.training.config.sections import EvaluationConfig
from parallel_rl.training.data.examples import Prompt
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.rollouts.sampler import ROWS_AT_A_TIME, sample
from parallel_rl.training.session import Session, TrainProgress


def pass_at_k(passed: Tensor, k: int) -> Tensor:
    """Estimate the chance [N] that one of k completions passes, without bias, from `passed` [N, n].

    1 − C(n − c, k) / C(n, k) for c passing completions (arXiv 2107.03374), as 1 − Π_{i = n−c+1}^{n} (1 − k / i).
    ValueError for k outside [1, n].

    >>> pass_at_k(torch.tensor([[True, False, False, False], [False, False, False, False]]), 2).tolist()
    [0.5, 0.0]
    """
    n = passed.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} must lie in [1, {n}], the completions of a prompt")
    i = torch.arange(1, n + 1, dtype=torch.float64)
    among = i > n - passed.sum(1, keepdim=True)
    return 1 - torch.where(among, 1 - k / i, 1.0).prod(1)  # with fewer than k failures, one factor is 0


def evaluation_metrics(rewards: Tensor, sources: Sequence[str | None], passing: float) -> dict[str, float]:
    """Return mean@n, the mean reward, and pass@k for k = 2, 4, ..., n of N prompts' `rewards` [N, n].

    With several `sources` (of each prompt, or None) also for each, as `held_out_mean@4/gsm8k`. A completion passes from
    the reward `passing`. A single completion has only the mean reward.

    >>> evaluation_metrics(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), ["a", "b"], 1.0)["held_out_pass@2/a"]
    1.0
    """
    n, metrics = rewards.shape[1], dict[str, float]()
    names = sorted({source for source in sources if source is not None})
    parts = [("", list(range(len(sources))))]
    if len(names) > 1:
        parts += [(f"/{name}", [row for row, source in enumerate(sources) if source == name]) for name in names]
    for suffix, rows in parts:
        part = rewards[rows]
        if n > 1 or suffix:
            metrics[f"held_out_mean@{n}{suffix}"] = float(part.mean())
        for k in ks(n):
            metrics[f"held_out_pass@{k}{suffix}"] = float(pass_at_k(part >= passing, k).mean())
    return metrics


def ks(n: int) -> list[int]:
    """List 2, 4, 8, ... below n, and n; empty for n = 1.

    >>> ks(6)
    [2, 4, 6]
    """
    powers = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*powers, n] if n > 1 else []


_MOST = 4000  # characters of a text


@dataclass(frozen=True)
class ShownSample:
    """A completion of a held-out prompt; `number` counts prompts from 1."""

    number: int
    prompt: str
    completion: str
    answer: str
    reward: float


def shown_text(samples: Sequence[ShownSample]) -> str:
    """Format reward, prompt, completion and expected answer of each sample.

    >>> print(shown_text([ShownSample(1, "1+1=", "3", "2", 0.0)]))
    held-out prompt 1, reward 0.000
      prompt      1+1=
      completion  3
      answer      2
    """
    lines = []
    for shown in samples:
        lines.append(f"held-out prompt {shown.number}, reward {shown.reward:.3f}")
        for name in ("prompt", "completion", "answer"):
            text = getattr(shown, name)
            if (more := len(text) - _MOST) > 0:
                text = f"{text[:_MOST]} … ({more:,} more characters)"
            first, *others = printable(text).split("\n")
            lines += [f"  {name:<12}{first}".rstrip(), *(f"{'':14}{line}" for line in others)]
    return "\n".join(lines)


@dataclass(frozen=True)
class Evaluation:
    """Mean reward of all completions, further metrics by name, and samples to show; equal on every rank."""

    reward: float
    metrics: Mapping[str, float]
    shown: Sequence[ShownSample] = ()


def evaluate(session: Session, config: EvaluationConfig, at: TrainProgress) -> Evaluation:
    """Score `samples` completions of each held-out prompt, with the same seeds every time.

    Servers that receive the trainer's weights (`server.update`) sample them, else the trainer does. A completion
    without a score has reward 0. ValueError on every rank if a server failed or too many rewards failed.
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
        chosen = raise_on_all_ranks(partial(_prompts_at, prompts, [index // samples for index in ids]))
        sources |= {index // samples: prompt.source for index, prompt in zip(ids, chosen, strict=True)}
        completions = _draw(session, chosen, ids)
        rewards.append(completion_rewards(session, chosen, completions).values)
        shown += _shown(session, config, ids, chosen, completions, rewards[-1].nan_to_num(0.0))
    local = torch.cat(rewards)
    session.failures.count(len(local), {"reward": local.isnan()}, groups.data, engine.replica_groups)
    failed = session.failures.metrics()["samples_failed/reward"]  # the counts of a step start at 0
    local = local.nan_to_num(0.0)
    scores = torch.zeros(count, dtype=torch.float64)
    scores[mine.start : mine.stop] = local
    by_completion = sum_over_groups(scores, [groups.data])
    everywhere = {number: source for part in gather_results(lambda: sources) for number, source in part.items()}
    by_prompt = [everywhere[number] for number in range(len(prompts))]
    metrics = evaluation_metrics(by_completion.view(-1, samples), by_prompt, config.passing)
    metrics |= {"held_out_samples_failed/reward": failed}
    if config.show:
        by_number = {sample.number: sample for part in gather_results(lambda: shown) for sample in part}
        shown = [by_number[number] for number in sorted(by_number)]
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


def _prompts_at(prompts: Records[Prompt], indices: Sequence[int]) -> list[Prompt]:
    return [prompts[index] for index in indices]
