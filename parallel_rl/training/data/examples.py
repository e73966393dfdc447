"""Prompts, demonstrations, preference pairs and recorded rollouts, each from a row of JSONL or Parquet."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_rl.config.strict import nearest
from parallel_rl.training.tokenizer.protocol import Message, Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A question and its answer: ids of the prompt, and both as text for the checker."""

    tokens: tuple[int, ...]
    text: str
    answer: str


@dataclass(frozen=True)
class Example:
    """A demonstration: the loss is on the completion."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt, the first preferred."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True)
class Rollout:
    """A sample that was generated elsewhere: `logprobs` are those of its last `len(logprobs)` tokens.

    Either `reward` (advantages are then made within `group`) or `advantage` is set. `staleness` is how many optimizer steps the
    policy that drew it lay behind, where that is known. `run` names the trajectory that it is a part of. `segments` are the
    turns of those tokens, numbers that do not decrease, or −1 where the environment wrote a token, which carries no loss.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    group: int
    reward: float | None
    advantage: float | None
    staleness: int | None = None
    run: int | None = None
    segments: tuple[int, ...] | None = None


def parse_prompt(row: Mapping[str, object], tokenizer: Tokenizer) -> Prompt:
    """{"prompt": text, "answer": text}.

    Raises:
        ValueError: a field that is missing, unknown or malformed; a character that the tokenizer lacks.
    """
    _known(row, {"prompt", "answer"})
    text, answer = _text(row, "prompt"), _text(row, "answer")
    return Prompt(tuple(tokenizer.render(_asking(text))), text, answer)


def parse_example(row: Mapping[str, object], tokenizer: Tokenizer) -> Example:
    """{"prompt": text, "answer": text}, to imitate.

    Raises:
        ValueError: as `parse_prompt`.
    """
    _known(row, {"prompt", "answer"})
    messages = _asking(_text(row, "prompt"))
    return Example(tuple(tokenizer.render(messages)), tuple(tokenizer.completion(messages, _text(row, "answer"))))


def parse_pair(row: Mapping[str, object], tokenizer: Tokenizer) -> Pair:
    """{"prompt": text, "chosen": text, "rejected": text}.

    Raises:
        ValueError: as `parse_prompt`, or equal completions.
    """
    _known(row, {"prompt", "chosen", "rejected"})
    messages, chosen, rejected = _asking(_text(row, "prompt")), _text(row, "chosen"), _text(row, "rejected")
    if chosen == rejected:
        raise ValueError(f"'chosen' and 'rejected' are both {chosen!r}")
    completions = (tuple(tokenizer.completion(messages, text)) for text in (chosen, rejected))
    return Pair(tuple(tokenizer.render(messages)), *completions)


def parse_rollout(row: Mapping[str, object], vocab_size: int) -> Rollout:
    """{"tokens": [ids], "logprobs": [floats], "group": integer, and "reward" or "advantage": float}.

    Beside them it may have "staleness" and "run", integers, and "segments", one integer a log-prob.

    Raises:
        ValueError: a field that is missing, unknown or malformed.
    """
    _known(row, {"tokens", "logprobs", "group", "reward", "advantage", "staleness", "run", "segments"})
    tokens, logprobs = _numbers(row, "tokens", integer=True), _numbers(row, "logprobs")
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        outside = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(f"'tokens' holds {outside}, which lies outside the vocabulary [0, {vocab_size})")
    if not 1 <= len(logprobs) < len(tokens):
        raise ValueError(
            f"'logprobs' has {len(logprobs)} values for {len(tokens)} 'tokens'; one per generated token is needed, "
            "and the first token cannot be a generated one"
        )
    if max(logprobs) > 0:
        raise ValueError(f"'logprobs' holds {max(logprobs)}; a log-probability is at most 0")
    if ("reward" in row) == ("advantage" in row):
        raise ValueError("exactly one of 'reward' and 'advantage' is needed")
    reward = _number(row["reward"], "reward") if "reward" in row else None
    advantage = _number(row["advantage"], "advantage") if "advantage" in row else None
    group = int(_number(_field(row, "group"), "group", integer=True))
    staleness, run = (int(_number(row[key], key, integer=True)) if key in row else None for key in ("staleness", "run"))
    segments = _segments(row, len(logprobs)) if "segments" in row else None
    return Rollout(tuple(map(int, tokens)), tuple(logprobs), group, reward, advantage, staleness, run, segments)


def _segments(row: Mapping[str, object], count: int) -> tuple[int, ...]:
    segments = tuple(map(int, _numbers(row, "segments", integer=True)))
    if len(segments) != count:
        raise ValueError(f"'segments' has {len(segments)} values for {count} 'logprobs'; they must be as many")
    turns = [turn for turn in segments if turn != -1]
    if not turns or turns != sorted(turns) or turns[0] < 0:
        raise ValueError(
            f"'segments' = {list(segments)} must be turns that do not decrease, at least 0, or -1 for tokens of the environment"
        )
    return segments


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """JSONL of what `parse_rollout` reads."""
    lines = []
    for rollout in rollouts:
        value = ("advantage", rollout.advantage) if rollout.reward is None else ("reward", rollout.reward)
        row = {"group": rollout.group, "tokens": rollout.tokens, "logprobs": rollout.logprobs, value[0]: value[1]}
        row |= {key: x for key in ("staleness", "run", "segments") if (x := getattr(rollout, key)) is not None}
        lines.append(json.dumps(row) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def _asking(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _known(row: Mapping[str, object], fields: set[str]) -> None:
    for key in row:
        if key not in fields:
            raise ValueError(f"unknown field {key!r}; {nearest(key, (fields - row.keys()) or fields)}")


def _field(row: Mapping[str, object], key: str) -> object:
    if key not in row:
        raise ValueError(f"the field {key!r} is missing")
    return row[key]


def _text(row: Mapping[str, object], key: str) -> str:
    value = _field(row, key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key!r} = {value!r} is not valid; a text that is not empty is needed")
    return value


def _list(row: Mapping[str, object], key: str) -> list[object]:
    value = _field(row, key)
    if not isinstance(value, list):
        raise ValueError(f"{key!r} = {value!r} is not valid; a list is needed")
    return value


def _numbers(row: Mapping[str, object], key: str, integer: bool = False) -> Sequence[float]:
    items = _list(row, key)
    # thousands of them in each row: one by one only where one is wrong
    if not {*map(type, items)} <= ({int} if integer else {int, float}) or not all(map(math.isfinite, items)):  # type: ignore[arg-type]
        for index, item in enumerate(items):
            _number(item, f"{key}[{index}]", integer)
    return items  # type: ignore[return-value]


def _number(value: object, name: str, integer: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} = {value!r} is not valid; {'an integer' if integer else 'a finite number'} is needed")
    return value
