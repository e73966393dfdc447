"""Where experience comes from, and the draws of a step: again for prompts whose samples tell nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.agreement import communication_device, raise_on_all_ranks
from parallel_rl.experience.maker_config import DynamicSampling
from parallel_rl.experience.rewards import RewardFunction
from parallel_rl.experience.samples import Samples
from parallel_rl.groups import ParallelGroups

PromptT = TypeVar("PromptT")
ResultT = TypeVar("ResultT")
PerSample = Callable[[Samples], Tensor]


@dataclass(frozen=True)
class Sources(Generic[PromptT]):
    """Where experience comes from; every callable gets whole, padded samples and runs without gradient.

    Attributes:
        generate: (prompts, n) -> n samples of each prompt, those of a prompt together. It does not communicate over data ranks,
            which may call it a different number of times.
        score: samples -> [N] raw rewards, or [N, K] for an estimator that reads `reward_components`; see `text_rewards`.
        policy_logprobs: samples -> [N, S]; None: the sampler's `generation_logprobs`, if there are any.
        reference_logprobs: samples -> [N, S] of the frozen reference.
        values: samples -> [N, S] of the critic; column t is the value before token t.
        more: how many -> that many other prompts, for dynamic sampling.
        others: what else an estimator reads, by name, such as greedy_rewards [N], teacher_token_logprobs [N, S].
    """

    generate: Callable[[Sequence[PromptT], int], Samples]
    score: PerSample
    policy_logprobs: PerSample | None = None
    reference_logprobs: PerSample | None = None
    values: PerSample | None = None
    more: Callable[[int], Sequence[PromptT]] | None = None
    others: Mapping[str, PerSample] = field(default_factory=dict)


def text_rewards(reward: RewardFunction) -> PerSample:
    """A score for `Sources` from a reward function on texts: of `prompts`, `completions` and `answers` (none: empty ones)."""

    def score(samples: Samples) -> Tensor:
        if samples.prompts is None or samples.completions is None:
            raise ValueError("rewards of texts need samples with prompts and completions, which are missing")
        return reward(samples.prompts, samples.completions, samples.answers or ("",) * len(samples))

    return score


class Drawn(NamedTuple):
    """Samples of this rank's prompts, raw rewards [N] or [N, K], which samples count [N], and how many prompts it took."""

    samples: Samples
    rewards: Tensor
    keep: Tensor
    tried: int


def draw(
    sources: Sources[PromptT],
    prompts: Sequence[PromptT],
    count: int,
    dynamic: DynamicSampling | None,
    groups: ParallelGroups,
) -> Drawn:
    """`count` samples of each prompt with their rewards; with dynamic sampling of each prompt that stays, as many as `prompts`.

    Raises:
        ValueError: what a source raised on any data rank, or gave in a wrong shape; no prompts; rounds that ran out.
    """
    parts: list[tuple[Samples, Tensor, bool]] = []
    asked, tried, rounds = list(prompts), 0, dynamic.max_rounds if dynamic else 1
    for index in range(rounds):
        # a rank that has all it needs only keeps the others company, but for the first round
        work = partial(_round, sources, asked, count) if asked or not index else lambda: None
        found = raise_on_all_ranks(work, [groups.data])
        lacking, tried = 0, tried + len(asked)
        if found is not None:
            samples, rewards = found
            good = _informative(rewards, count, dynamic).repeat_interleave(count)
            lacking = int((~good).sum()) // count
            parts.append((samples.select(good.nonzero()[:, 0]), rewards[good], True))
        missing = _total(lacking, groups) if dynamic else 0
        if not missing:
            break
        if index == rounds - 1:
            _refuse_or_mask(dynamic, missing)
            if found is not None:
                parts.append((samples.select((~good).nonzero()[:, 0]), rewards[~good], False))
            break
        asked = raise_on_all_ranks(partial(_others, sources, lacking), [groups.data])
    samples = Samples.concat([part for part, _, _ in parts])
    if samples.group_ids is None:
        own = torch.arange(len(samples)) // count + (groups.dp_rank << 40)  # ids of no other rank
        samples = replace(samples, group_ids=own.to(samples.lengths.device))
    rewards = torch.cat([part for _, part, _ in parts])
    keep = torch.cat([torch.full((len(part),), flag, device=rewards.device) for part, _, flag in parts])
    return Drawn(samples, rewards, keep, tried)


def _round(sources: Sources[PromptT], prompts: Sequence[PromptT], count: int) -> tuple[Samples, Tensor]:
    if not prompts:
        raise ValueError("there are no prompts to make experience of")
    samples = sources.generate(prompts, count)
    if len(samples) != len(prompts) * count or samples.packed:
        layout = "packed" if samples.packed else "padded"
        raise ValueError(
            f"generate gave {len(samples)} {layout} samples for {len(prompts)} prompts; {count} padded ones of each are needed"
        )
    rewards = sources.score(samples)
    if not isinstance(rewards, Tensor) or rewards.dim() not in (1, 2) or len(rewards) != len(samples):
        got = list(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
        raise ValueError(f"score must give [N] or [N, K] rewards of N = {len(samples)} samples, got {got}")
    if not bool(rewards.isfinite().all()):
        raise ValueError(
            f"score gave a reward that is not finite, of sample {int((~rewards.isfinite()).nonzero()[0, 0])}"
        )
    return samples, rewards.double().to(samples.lengths.device)


def _others(sources: Sources[PromptT], count: int) -> list[PromptT]:
    assert sources.more is not None
    found = list(sources.more(count)) if count else []
    if len(found) != count:
        raise ValueError(f"sources.more gave {len(found)} prompts where {count} were asked for")
    return found


def _informative(rewards: Tensor, count: int, dynamic: DynamicSampling | None) -> Tensor:
    """[prompts] which of them stay."""
    total = rewards if rewards.dim() == 1 else rewards.sum(1)
    mean = total.view(-1, count).mean(1)
    return torch.ones_like(mean, dtype=torch.bool) if dynamic is None else (dynamic.low < mean) & (mean < dynamic.high)


def _total(number: int, groups: ParallelGroups) -> int:
    if groups.dp_size == 1:
        return number
    total = torch.tensor([number], device=communication_device(groups.data, torch.device("cpu")))
    dist.all_reduce(total, group=groups.data)
    return int(total)


def _refuse_or_mask(dynamic: DynamicSampling | None, missing: int) -> None:
    assert dynamic is not None
    if dynamic.exhausted == "error":
        raise ValueError(
            f"after {dynamic.max_rounds} rounds {missing} prompts have no mean reward between {dynamic.low} and "
            f"{dynamic.high}; raise max_rounds, widen the bounds, or set exhausted to 'mask'"
        )
