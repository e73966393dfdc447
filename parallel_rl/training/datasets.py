"""Everything a run reads, read and checked before any work, and the order in which it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from parallel_rl.training.config import TrainConfig
from parallel_rl.training.data import (
    Example,
    Pair,
    Prompt,
    Rollout,
    read_examples,
    read_pairs,
    read_prompts,
    read_rollouts,
)
from parallel_rl.training.objectives import RLConfig
from parallel_rl.training.tokenizer import CharTokenizer


@dataclass(frozen=True)
class Datasets:
    """What the config names; the rest is empty."""

    train: Sequence[Prompt] = ()
    held_out: Sequence[Prompt] = ()
    examples: Sequence[Example] = ()
    pairs: Sequence[Pair] = ()
    rollouts: Sequence[Rollout] = ()

    def longest(self, max_new_tokens: int) -> int:
        """Tokens of the longest sequence that a run can make of it."""
        lengths = [len(prompt.tokens) + max_new_tokens for prompt in (*self.train, *self.held_out)]
        lengths += [len(example.prompt) + len(example.completion) for example in self.examples]
        lengths += [len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in self.pairs]
        return max([*lengths, *(len(rollout.tokens) for rollout in self.rollouts)])


def read_datasets(config: TrainConfig, tokenizer: CharTokenizer) -> Datasets:
    """Reads the files that the config names.

    Raises:
        ValueError: a missing file, a malformed line (by file and number), a prompt in both `train` and `held_out`, an answer
            that `sampling.max_new_tokens` cannot hold, recorded rollouts that do not fill steps with whole groups.
    """
    files = config.data
    train = read_prompts(files.train, tokenizer) if files.train else []
    held_out = read_prompts(files.held_out, tokenizer) if files.held_out else []
    both = {prompt.text for prompt in train} & {prompt.text for prompt in held_out}
    if both:
        raise ValueError(
            f"the prompt {min(both)!r} is in data.train and in data.held_out; held-out prompts must not be trained on"
        )
    for prompt in (*train, *held_out):
        needed = len(tokenizer.completion(prompt.answer))
        if needed > config.sampling.max_new_tokens:
            raise ValueError(
                f"the answer {prompt.answer!r} and its end take {needed} tokens; sampling.max_new_tokens = "
                f"{config.sampling.max_new_tokens} must be at least that"
            )
    rollouts = read_rollouts(files.rollouts, tokenizer.vocab_size) if files.rollouts else []
    if config.rl is not None and rollouts:
        check_groups(rollouts, config.rl.prompts * config.rl.group_size, config.rl.steps)
        _check_rewards(rollouts, config.rl)
    return Datasets(
        train=train,
        held_out=held_out,
        examples=read_examples(files.examples, tokenizer) if files.examples else [],
        pairs=read_pairs(files.pairs, tokenizer) if files.pairs else [],
        rollouts=rollouts,
    )


def check_groups(rollouts: Sequence[Rollout], count: int, steps: int) -> None:
    """Recorded rollouts fill `steps` steps of `count` sequences, over and over if need be, and no step cuts a group.

    Raises:
        ValueError: fewer than one step's, a step that begins or ends within a group, or passes that shift the steps.
    """
    if len(rollouts) < count or (len(rollouts) < steps * count and len(rollouts) % count):
        raise ValueError(
            f"data.rollouts has {len(rollouts)} sequences; rl.prompts × group_size = {count} a step, for {steps} steps, "
            f"needs {steps * count} of them or a smaller multiple of {count}"
        )
    for place in range(count, min(len(rollouts), steps * count), count):
        if rollouts[place - 1].group == rollouts[place].group:
            raise ValueError(
                f"data.rollouts: group {rollouts[place].group} lies in two steps of rl.prompts × group_size = {count} "
                f"sequences (at sequence {place + 1}); a group must be whole in its step"
            )


def _check_rewards(rollouts: Sequence[Rollout], config: RLConfig) -> None:
    if rollouts[0].reward is not None:
        return
    readers = {
        f"rl.loss.name = {config.loss.name!r}": "rewards" in config.loss.reads,
        "rl.critic": config.critic is not None,
        "rl.teacher": config.teacher is not None,
        "rl.overlong": config.overlong is not None,
    }
    for reader, reads in readers.items():
        if reads:
            raise ValueError(f"data.rollouts gives advantages, no rewards; {reader} needs rewards")


def take(size: int, first: int, count: int, seed: int) -> list[int]:
    """Items `first` to `first + count` of an endless stream of shuffled passes over `size` items, fixed by the seed."""
    return [_pass(size, place // size, seed)[place % size] for place in range(first, first + count)]


@lru_cache(maxsize=8)
def _pass(size: int, number: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order
