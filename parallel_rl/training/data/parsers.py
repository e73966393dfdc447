"""Parsers of each source's rows, and of solutions with labelled steps (TRL's stepwise form)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

from parallel_rl.config.json_text import brief
from parallel_rl.config.strict import nearest
from parallel_rl.training.config.data import FIELDS
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.conversations import conversation, tools_of
from parallel_rl.training.data.examples import (
    Answer,
    Example,
    Pair,
    Prompt,
    Rollout,
    parse_answer,
    parse_example,
    parse_pair,
    parse_prompt,
    parse_rollout,
)
from parallel_rl.training.data.format import Format, Row, UserValues, answer_values, field_of
from parallel_rl.training.data.forms import Forms, read_of
from parallel_rl.training.tokenizer.protocol import Target, Tokenizer


@final
@dataclass(frozen=True)
class Solution:
    """A prompt and its answer in steps; the target's mask is 1 at the last token of each step.

    `labels` has 1 for a good step and 0 for a bad one; soft labels lie between.
    """

    prompt: tuple[int, ...]
    target: Target
    labels: tuple[float, ...]
    user_values: UserValues = ()


def parse_solution(
    row: Row, form: Format, separator: Sequence[int], soft: bool = False, last_only: bool = False
) -> Solution:
    """Read {"prompt": text or messages, "completions": a text for each step, "labels": one for each step}.

    A step's tokens are those of its text, then the separator's, as in TRL. A label is true or 1, or false, 0 or -1; a
    probability if `soft`. If `last_only`, only the last step's label is learned. ValueErrors of `parse_prompt`, or for
    no steps, a step that is no text, or one without a valid label.
    """
    fields, _ = form.fields(row, "solutions")
    steps, labels = (field_of(fields, key, row) for key in ("completions", "labels"))
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step for step in steps):
        raise ValueError(f"'completions' = {brief(steps)} is not valid; a list of texts, one for each step, is needed")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise ValueError(
            f"'labels' = {brief(labels)} is not valid; a list of {len(steps)} is needed, one for each step"
        )
    prompt_messages = conversation(fields, form.system, row)
    tokens, mask = list[int](), list[int]()
    for step in steps:
        ids = [*form.tokenizer.encode(step), *separator]
        tokens += ids
        mask += [*[0] * (len(ids) - 1), 1]
    values = tuple(_label(label, f"labels[{number}]", soft) for number, label in enumerate(labels))
    field_values = answer_values(row, form.user_fields, Target(tuple(tokens), tuple(mask)), "steps")
    if last_only:
        mask, values = [*[0] * (len(tokens) - 1), 1], values[-1:]
    prompt = tuple(form.tokenizer.render(prompt_messages, tools_of(fields)))
    return Solution(prompt, Target(tuple(tokens), tuple(mask)), values, field_values)


def _label(label: object, name: str, soft: bool) -> float:
    if isinstance(label, int | float) and (0 <= label <= 1 if soft else label in (1, 0, -1)):
        return float(max(label, 0))
    right = "a probability" if soft else "true or 1 for a good step, false, 0 or -1 for a bad one,"
    raise ValueError(f"{name} = {brief(label)} is not valid; {right} is needed")


class Parsers(NamedTuple):
    """Functions from a row to a record, by source."""

    train: Callable[[Row], Prompt]
    held_out: Callable[[Row], Prompt]
    examples: Callable[[Row], Example]
    pairs: Callable[[Row], Pair]
    answers: Callable[[Row], Answer]
    solutions: Callable[[Row], Solution]
    rollouts: Callable[[Row], Rollout]


def parsers(config: TrainConfig, tokenizer: Tokenizer, forms: Forms | None = None) -> Parsers:
    """Build the parsers of a run's sources for the forms of `find_forms`; None: this package's fields."""
    data, forms = config.data, forms or {}
    form = {
        name: Format(
            tokenizer,
            data.columns_of(name),
            data.system,
            data.mask_history,
            read_of(forms, name),
            config.user_fields(name),
        )
        for name in FIELDS
    }
    return Parsers(
        partial(_rewarded_prompt, form=form["train"], rewards=config.rewards),
        partial(_rewarded_prompt, form=form["held_out"], rewards=config.rewards),
        partial(parse_example, form=form["examples"]),
        partial(parse_pair, form=form["pairs"]),
        partial(parse_answer, form=form["answers"]),
        _solutions(config, form["solutions"]),
        partial(
            parse_rollout,
            vocab_size=config.model.vocabulary(tokenizer.vocabulary).size,
            user_fields=config.user_fields("rollouts"),
        ),
    )


def _solutions(config: TrainConfig, form: Format) -> Callable[[Row], Solution]:
    """Build the parser of solutions; ValueError if their separator does not end with the scored token."""
    if config.sft is None or config.sft.source != "solutions":
        return partial(parse_solution, form=form, separator=())
    separator, options = form.tokenizer.encode(config.data.step_separator), config.sft.loss.options
    last = separator[-1] if separator else None
    if (placeholder := options.get("placeholder_token_id", last)) != last or last is None:
        raise ValueError(
            f"sft.loss.options.placeholder_token_id = {placeholder} is not the last token of data.step_separator = "
            f"{config.data.step_separator!r}, whose ids are {separator}. Set it to {last}, or choose another separator"
        )
    soft, last_only = options.get("soft_labels") is True, config.data.last_step_only
    return partial(parse_solution, form=form, separator=separator, soft=soft, last_only=last_only)


def _rewarded_prompt(row: Row, form: Format, rewards: Mapping[str | None, object]) -> Prompt:
    """Parse a prompt and check that its source has a reward."""
    prompt = parse_prompt(row, form)
    if None not in rewards and prompt.source not in rewards:
        what = (
            "the field 'source' is missing" if prompt.source is None else f"'source' = {prompt.source!r} has no reward"
        )
        raise ValueError(f"{what}; {nearest(prompt.source or '', map(str, rewards))}")
    return prompt
