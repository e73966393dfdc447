"""Samples of an evaluation as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_rl.config.shown import printable

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
    for sample in samples:
        lines.append(f"held-out prompt {sample.number}, reward {sample.reward:.3f}")
        for name in ("prompt", "completion", "answer"):
            text = getattr(sample, name)
            if (more := len(text) - _MOST) > 0:
                text = f"{text[:_MOST]} … ({more:,} more characters)"
            first, *others = printable(text).split("\n")
            lines += [f"  {name:<12}{first}".rstrip(), *(f"{'':14}{line}" for line in others)]
    return "\n".join(lines)
