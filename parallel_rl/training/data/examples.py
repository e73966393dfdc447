"""Parse prompts, demonstrations, preference pairs and recorded rollouts from rows of JSONL or Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from parallel_rl.config.json_text import brief
from parallel_rl.losses.core.requirements import Field
from parallel_rl.training.config.data import ROLLOUT_FIELDS
from parallel_rl.training.data.conversations import (
    answers_of,
    asked_text,
    conversation,
    is_empty,
    shared_turns,
    split_turns,
    tools_of,
    without_nulls,
)
from parallel_rl.training.data.format import (
    Format,
    Row,
    UnfitRecord,
    UserValues,
    answer_values,
    checked_number,
    field_of,
    numbers_of,
    pick,
    read_user_values,
    side_of,
    text_of,
    without_user_fields,
)
from parallel_rl.training.tokenizer.protocol import Message, Target


@final
@dataclass(frozen=True)
class Prompt:
    """A prompt's ids and text, with any JSON value as the answer.

    `source` chooses among several rewards; `extra` holds the record's other columns, for the reward function.
    """

    tokens: tuple[int, ...]
    text: str
    answer: object
    source: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Example:
    """A demonstration with its loss on the target; `user_values` are those of the user's fields."""

    prompt: tuple[int, ...]
    target: Target
    user_values: UserValues = ()


@final
@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, the first preferred, with the values of the user's own fields of each."""

    prompt: tuple[int, ...]
    chosen: Target
    rejected: Target
    user_values: tuple[UserValues, UserValues] = ((), ())


@final
@dataclass(frozen=True)
class Answer:
    """One answer to a prompt, desirable or not, with the values of the user's own fields."""

    prompt: tuple[int, ...]
    target: Target
    desirable: bool
    user_values: UserValues = ()


@final
@dataclass(frozen=True)
class Rollout:
    """A recorded sample; `logprobs` belong to its last `len(logprobs)` tokens.

    Either `reward` (for advantages within `group`) or `advantage` is set. `staleness`, if known, is the number of
    optimizer steps since the sampling weights. `run` names the sample's trajectory. `segments` number those tokens'
    turns in ascending order, −1 for a token of the environment. `mask` is 1 for tokens that the policy sampled and 0
    for a tool's. `user_values` are those of the user's fields: numbers of the sequence, or one for each of those tokens.
    `sample_mask` is 0 for a sample without loss, such as one whose reward failed.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    group: int
    reward: float | None
    advantage: float | None
    staleness: int | None = None
    run: int | None = None
    segments: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    user_values: UserValues = ()
    sample_mask: int | None = None


def parse_prompt(row: Row, form: Format) -> Prompt:
    """Parse {"prompt": text or "messages": [{role, content}], "answer": any value}.

    "system", "source" and "tools" are optional. ValueError if a field is missing, unknown or malformed, or the
    tokenizer has no ids for a text.
    """
    fields, extra = form.fields(row, "train")
    messages, source = conversation(fields, form.system, row), None
    if messages[-1]["role"] == "assistant":
        raise ValueError("'messages' ends with an answer; a prompt ends where the policy is to answer")
    if (answer := field_of(fields, "answer", row)) in ("", None):
        raise ValueError(
            f"'answer' = {answer!r} is not valid; a text that is not empty, or another JSON value, is needed"
        )
    if "source" in fields:
        extra["source"] = source = str(fields["source"])
    tokens = tuple(form.tokenizer.render(messages, tools_of(fields)))
    return Prompt(tokens, asked_text(messages), answer, source, extra)


def parse_example(row: Row, form: Format) -> Example:
    """Parse {"prompt": text or messages, "answer": the same}, {"messages": [...]} or {"text": text}.

    `messages` may replace `prompt`. Of `messages` without an "answer", each turn of the assistant has loss, unless
    `form.mask_history`. ValueErrors of `parse_prompt`.
    """
    fields, _ = form.fields(row, "examples")
    if "text" in fields:
        if len(fields) > 1:
            raise ValueError(f"'text' is all of a record; it also has {', '.join(map(repr, fields.keys() - {'text'}))}")
        first, *tokens = form.tokenizer.document(text_of(fields, "text"))
        target = Target(tuple(tokens))
        return Example((first,), target, answer_values(row, form.user_fields, target))
    prompt = conversation(fields, form.system, row)
    if "messages" in fields and "answer" not in fields:
        prompt, answers = split_turns(prompt, form.mask_history)
    else:
        answers = answers_of(field_of(fields, "answer", row), "answer", prompt)
    _check_weights(answers)
    tools = tools_of(fields)
    target = form.tokenizer.target(prompt, answers, tools)
    return Example(tuple(form.tokenizer.render(prompt, tools)), target, answer_values(row, form.user_fields, target))


def parse_pair(row: Row, form: Format) -> Pair:
    """Parse {"prompt": text or messages, "chosen": the same, "rejected": the same}; may have "system".

    An answer's messages may repeat those of the prompt; then "prompt" may be missing. `messages` may replace it.
    ValueErrors of `parse_prompt`, or for equal answers.
    """
    fields, _ = form.fields(row, "pairs")
    chosen, rejected = field_of(fields, "chosen", row), field_of(fields, "rejected", row)
    if without_nulls(chosen) == without_nulls(rejected):
        raise UnfitRecord(f"'chosen' and 'rejected' are both {brief(chosen)}", "invalid")
    for key, value in (("chosen", chosen), ("rejected", rejected)):
        if is_empty(value):
            raise UnfitRecord(f"{key!r} = {brief(value)} is empty", "invalid")
    if isinstance(chosen, list) and isinstance(rejected, list) and fields.keys().isdisjoint(("prompt", "messages")):
        fields = {**fields, "messages": shared_turns(chosen, rejected)}
    prompt = conversation(fields, form.system, row)
    sides = [answers_of(value, key, prompt) for key, value in (("chosen", chosen), ("rejected", rejected))]
    tools = tools_of(fields)
    for side in sides:
        _check_weights(side)
    first, second = (form.tokenizer.target(prompt, answers, tools) for answers in sides)
    if first == second:
        raise UnfitRecord(f"'chosen' and 'rejected' have the same tokens, of {brief(chosen)}", "invalid")
    field_values = tuple(
        answer_values(side_of(row, form.user_fields, side), form.user_fields, target)
        for side, target in (("chosen", first), ("rejected", second))
    )
    return Pair(tuple(form.tokenizer.render(prompt, tools)), first, second, field_values)  # type: ignore[arg-type]  # two of them


def parse_answer(row: Row, form: Format) -> Answer:
    """Parse a prompt, its "answer" and "label": 1 (true), 0 (false) or −1; ValueErrors of `parse_prompt`."""
    fields, _ = form.fields(row, "answers")
    label = field_of(fields, "label", row)
    if not isinstance(label, int | float) or label not in (1, 0, -1):
        raise ValueError(
            f"'label' = {brief(label)} is not valid; true or 1 is desirable, false, 0 or -1 undesirable. Use data.map to "
            "convert or leave out such records"
        )
    prompt = conversation(fields, form.system, row)
    answer = field_of(fields, "answer", row)
    if is_empty(answer):
        raise UnfitRecord(f"'answer' = {brief(answer)} is empty", "invalid")
    tools = tools_of(fields)
    answers = answers_of(answer, "answer", prompt)
    _check_weights(answers)
    target = form.tokenizer.target(prompt, answers, tools)
    field_values = answer_values(row, form.user_fields, target)
    return Answer(tuple(form.tokenizer.render(prompt, tools)), target, label == 1, field_values)


def _check_weights(answers: Sequence[Message]) -> None:
    if all(answer.get("weight") == 0 for answer in answers if answer["role"] == "assistant"):
        raise ValueError("no answer is learned: each has weight 0")


def parse_rollout(row: Row, vocab_size: int, user_fields: Sequence[Field] = ()) -> Rollout:
    """Parse {"tokens": [ids], "logprobs": [floats], "group": integer, "reward" or "advantage": float}.

    It may have "staleness", "run" and "sample_mask" (0 or 1), and for each log-prob "segments" (an integer) and "mask"
    (0 or 1). It has the `user_fields`: one number, or one for each log-prob. ValueError if a field is missing,
    unknown or malformed.
    """
    pick(without_user_fields(row, user_fields), ROLLOUT_FIELDS, {})
    tokens, logprobs = numbers_of(row, "tokens", integer=True), numbers_of(row, "logprobs")
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
    reward, advantage = (checked_number(row[key], key) if key in row else None for key in ("reward", "advantage"))
    group = int(checked_number(field_of(row, "group"), "group", integer=True))
    integers = {
        key: int(checked_number(row[key], key, integer=True))
        for key in ("staleness", "run", "sample_mask")
        if key in row
    }
    if (keep := integers.get("sample_mask", 1)) not in (0, 1):
        raise ValueError(f"'sample_mask' = {keep} must be 1 for a sample to train on, or 0")
    segments = _segments(row, len(logprobs)) if "segments" in row else None
    mask = _mask(row, len(logprobs), segments) if "mask" in row else None
    values = read_user_values(row, user_fields, len(logprobs), "'logprobs'")
    return Rollout(
        tuple(map(int, tokens)),
        tuple(logprobs),
        group,
        reward,
        advantage,
        segments=segments,
        mask=mask,
        user_values=values,
        **integers,
    )


def _integers_of(row: Row, key: str, count: int) -> tuple[int, ...]:
    values = tuple(map(int, numbers_of(row, key, integer=True)))
    if len(values) != count:
        raise ValueError(f"{key!r} has {len(values)} values for {count} 'logprobs'; their numbers must be equal")
    return values


def _segments(row: Row, count: int) -> tuple[int, ...]:
    segments = _integers_of(row, "segments", count)
    turns = [turn for turn in segments if turn != -1]
    if not turns or turns != sorted(turns) or turns[0] < 0:
        raise ValueError(
            f"'segments' = {list(segments)} must be turns that do not decrease, at least 0, or -1 for tokens of the environment"
        )
    return segments


def _mask(row: Row, count: int, segments: Sequence[int] | None) -> tuple[int, ...]:
    mask = _integers_of(row, "mask", count)
    if not {*mask} <= {0, 1} or not any(mask):
        raise ValueError(
            f"'mask' = {list(mask)} must be 1 for tokens that the policy sampled, at least once, and 0 for a tool's"
        )
    if segments is not None and any(kept and turn < 0 for kept, turn in zip(mask, segments, strict=True)):
        raise ValueError("'mask' is 1 where 'segments' is -1, for a token of the environment; correct one of them")
    return mask


def write_rollouts(path: Path, rollouts: Iterable[Rollout], user_fields: Sequence[Field] = ()) -> None:
    """Write JSONL that `parse_rollout` reads, with the `user_fields`."""
    lines = []
    for rollout in rollouts:
        value = ("advantage", rollout.advantage) if rollout.reward is None else ("reward", rollout.reward)
        row = {"group": rollout.group, "tokens": rollout.tokens, "logprobs": rollout.logprobs, value[0]: value[1]}
        others = ("staleness", "run", "segments", "mask", "sample_mask")
        row |= {key: x for key in others if (x := getattr(rollout, key)) is not None}
        row |= {declared.name: value for declared, value in zip(user_fields, rollout.user_values, strict=True)}
        lines.append(json.dumps(row) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
