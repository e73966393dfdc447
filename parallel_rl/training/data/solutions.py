"""Solutions with labelled steps, for process reward models: records in TRL's stepwise form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from parallel_rl.config.json_text import brief
from parallel_rl.training.data.conversations import conversation, tools_of
from parallel_rl.training.data.format import Format, Own, Row, answer_values, field_of
from parallel_rl.training.tokenizer.protocol import Target


@final
@dataclass(frozen=True)
class Solution:
    """A prompt and its answer in steps; the target's mask is 1 at the last token of each step.

    `labels` has 1 for a good step and 0 for a bad one; soft labels lie between.
    """

    prompt: tuple[int, ...]
    target: Target
    labels: tuple[float, ...]
    own: Own = ()


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
    field_values = answer_values(row, form.own, Target(tuple(tokens), tuple(mask)), "steps")
    if last_only:
        mask, values = [*[0] * (len(tokens) - 1), 1], values[-1:]
    prompt = tuple(form.tokenizer.render(prompt_messages, tools_of(fields)))
    return Solution(prompt, Target(tuple(tokens), tuple(mask)), values, field_values)


def _label(label: object, name: str, soft: bool) -> float:
    if isinstance(label, int | float) and (0 <= label <= 1 if soft else label in (1, 0, -1)):
        return float(max(label, 0))
    right = "a probability" if soft else "true or 1 for a good step, false, 0 or -1 for a bad one,"
    raise ValueError(f"{name} = {brief(label)} is not valid; {right} is needed")
