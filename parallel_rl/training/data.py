"""Prompts, demonstrations, preference pairs and recorded rollouts from JSONL; every fault is named by file and line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from parallel_rl.config import nearest
from parallel_rl.training.tokenizer import CharTokenizer

RecordT = TypeVar("RecordT")


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

    Either `reward` (advantages are then made within `group`) or `advantage` is set.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    group: int
    reward: float | None
    advantage: float | None


def read_prompts(path: str, tokenizer: CharTokenizer) -> list[Prompt]:
    """Lines {"prompt": text, "answer": text}."""

    def parse(row: Mapping[str, object]) -> Prompt:
        _known(row, {"prompt", "answer"})
        text, answer = _text(row, "prompt"), _text(row, "answer")
        tokenizer.encode(answer)
        return Prompt(tuple(tokenizer.prompt(text)), text, answer)

    return read_jsonl(path, parse)


def read_examples(path: str, tokenizer: CharTokenizer) -> list[Example]:
    """Lines {"prompt": text, "answer": text}, to imitate."""

    def parse(row: Mapping[str, object]) -> Example:
        _known(row, {"prompt", "answer"})
        prompt, answer = _text(row, "prompt"), _text(row, "answer")
        return Example(tuple(tokenizer.prompt(prompt)), tuple(tokenizer.completion(answer)))

    return read_jsonl(path, parse)


def read_pairs(path: str, tokenizer: CharTokenizer) -> list[Pair]:
    """Lines {"prompt": text, "chosen": text, "rejected": text}."""

    def parse(row: Mapping[str, object]) -> Pair:
        _known(row, {"prompt", "chosen", "rejected"})
        prompt, chosen, rejected = (_text(row, key) for key in ("prompt", "chosen", "rejected"))
        if chosen == rejected:
            raise ValueError(f"'chosen' and 'rejected' are both {chosen!r}")
        completions = tuple(tokenizer.completion(chosen)), tuple(tokenizer.completion(rejected))
        return Pair(tuple(tokenizer.prompt(prompt)), *completions)

    return read_jsonl(path, parse)


def read_rollouts(path: str, vocab_size: int) -> list[Rollout]:
    """Lines {"tokens": [ids], "logprobs": [floats], "group": integer, and "reward" or "advantage": float}."""

    def parse(row: Mapping[str, object]) -> Rollout:
        _known(row, {"tokens", "logprobs", "group", "reward", "advantage"})
        tokens = tuple(int(_number(item, f"tokens[{i}]", integer=True)) for i, item in enumerate(_list(row, "tokens")))
        logprobs = tuple(_number(item, f"logprobs[{i}]") for i, item in enumerate(_list(row, "logprobs")))
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(f"'tokens' holds {outside[0]}, which lies outside the vocabulary [0, {vocab_size})")
        if not 1 <= len(logprobs) < len(tokens):
            raise ValueError(
                f"'logprobs' has {len(logprobs)} values for {len(tokens)} 'tokens'; one per generated token is needed, "
                "and the first token cannot be a generated one"
            )
        above = [value for value in logprobs if value > 0]
        if above:
            raise ValueError(f"'logprobs' holds {above[0]}; a log-probability is at most 0")
        if ("reward" in row) == ("advantage" in row):
            raise ValueError("exactly one of 'reward' and 'advantage' is needed")
        reward = _number(row["reward"], "reward") if "reward" in row else None
        advantage = _number(row["advantage"], "advantage") if "advantage" in row else None
        group = int(_number(_field(row, "group"), "group", integer=True))
        return Rollout(tokens, logprobs, group, reward, advantage)

    rollouts = read_jsonl(path, parse)
    rewarded = [rollout.reward is not None for rollout in rollouts]
    if any(rewarded) and not all(rewarded):
        odd = rewarded.index(not rewarded[0]) + 1
        raise ValueError(f"{Path(path)}, line {odd}: a file gives 'reward' in every line or 'advantage' in every line")
    return rollouts


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """What `read_rollouts` reads."""
    lines = []
    for rollout in rollouts:
        value = ("advantage", rollout.advantage) if rollout.reward is None else ("reward", rollout.reward)
        row = {"group": rollout.group, "tokens": rollout.tokens, "logprobs": rollout.logprobs, value[0]: value[1]}
        lines.append(json.dumps(row) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def read_jsonl(path: str, parse: Callable[[Mapping[str, object]], RecordT]) -> list[RecordT]:
    """One record a line.

    Raises:
        ValueError: the file is missing or empty, or a line is empty, no JSON object, or refused by `parse`; the message has the
            path and the line's number from 1.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"the data file {file.absolute()} does not exist")
    records = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                records.append(parse(_object(line)))
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
    if not records:
        raise ValueError(f"the data file {file.absolute()} is empty; at least one line is needed")
    return records


def _object(line: str) -> Mapping[str, object]:
    if not line.strip():
        raise ValueError("the line is empty; a JSON object is needed")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg} at column {error.colno}): {line.strip()[:80]!r}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed, got {line.strip()[:80]!r}")
    return row


def _known(row: Mapping[str, object], fields: set[str]) -> None:
    for key in row:
        if key not in fields:
            raise ValueError(f"unknown field {key!r}; {nearest(key, fields)}")


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


def _number(value: object, name: str, integer: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} = {value!r} is not valid; {'an integer' if integer else 'a finite number'} is needed")
    return value
