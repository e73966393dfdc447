"""Build the parsers of each source's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from parallel_rl.config.strict import nearest
from parallel_rl.training.config.data import FIELDS
from parallel_rl.training.config.train import TrainConfig
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
from parallel_rl.training.data.format import Format, Row
from parallel_rl.training.data.forms import Forms, read_of
from parallel_rl.training.data.solutions import Solution, parse_solution
from parallel_rl.training.tokenizer.protocol import Tokenizer


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
            config.own_fields(name),
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
            own=config.own_fields("rollouts"),
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
