"""Refuse, drop or cut records that do not fit a run: too long, or a pair with equal answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from parallel_rl.training.data.examples import Answer, Example, Pair, Prompt, Rollout
from parallel_rl.training.data.solutions import Solution
from parallel_rl.training.tokenizer.protocol import Target

RecordT = TypeVar("RecordT", Prompt, Example, Pair, Answer, Solution, Rollout)

WARN_SHARE = 0.1


@dataclass(frozen=True)
class Unfit:
    """Counts of a source's records that did not fit; `longest` has tokens of a sequence before any cut."""

    checked: int
    dropped: int
    cut: int
    longest: int

    def describe(self) -> str:
        """Describe how many records did not fit, with a warning for many."""
        parts = [(self.dropped, "dropped"), (self.cut, "cut")]
        text = ", ".join(f"{n:,} of {self.checked:,} records ({n / self.checked:.1%}) {what}" for n, what in parts if n)
        many = self.dropped + self.cut > WARN_SHARE * self.checked
        return f"{'warning: ' * many}{text}; the longest sequence had {self.longest:,} tokens"


def longest_that_fits(room: Callable[[int], None], most: int) -> int:
    """Return the most tokens, up to `most`, that `room` accepts; 0: none.

    >>> def room(tokens):
    ...     if tokens > 7:
    ...         raise ValueError
    >>> longest_that_fits(room, 100)
    7
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        try:
            room(middle)
            low = middle
        except ValueError:
            high = middle - 1
    return low


def shorten(record: RecordT, limit: int, new: int) -> RecordT:
    """Cut a record to `limit` tokens, with `new` sampled ones after a prompt; ValueError if none is left.

    A prompt of RL loses its first tokens. An example or a pair loses the end of its answers, as in TRL's `keep_start`; if the
    prompt leaves no room for a token with loss, the prompt also loses its first tokens.
    """
    if isinstance(record, Prompt):
        if limit <= new:
            raise ValueError(f"{limit} tokens leave no room for a prompt before sampling.max_new_tokens = {new}")
        return replace(record, tokens=record.tokens[-(limit - new) :])
    if isinstance(record, Rollout):
        return record
    targets = [record.target] if isinstance(record, Example | Answer | Solution) else [record.chosen, record.rejected]
    needed = max(_first_learned(target) for target in targets)
    if needed >= limit:
        raise ValueError(f"{limit} tokens leave no room for a prompt before the first learned token, place {needed}")
    prompt = record.prompt[-(limit - needed) :]
    cut = [begin_of(target, limit - len(prompt)) for target in targets]
    if isinstance(record, Example | Answer | Solution):
        return replace(record, prompt=prompt, target=cut[0])
    return replace(record, prompt=prompt, chosen=cut[0], rejected=cut[1])


def _first_learned(target: Target) -> int:
    """Count the tokens up to and including the first with loss."""
    return 1 if target.mask is None else target.mask.index(1) + 1


def begin_of(target: Target, count: int) -> Target:
    return Target(target.tokens[:count], None if target.mask is None else target.mask[:count])
