"""Conversations of records: what is asked, and the turns of the assistant behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel_rl.config.json_text import brief
from parallel_rl.training.data.format import Row, text_of
from parallel_rl.training.tokenizer.protocol import Message

ANSWERS = "'assistant'"


def conversation(fields: Row, system: str | None, row: Row | None = None) -> list[Message]:
    """The messages of a record: those of `messages` or `prompt`, or the text of `prompt` as the user's; a system text first.

    Raises:
        ValueError: neither or both are given, a malformed message, or two system texts.
    """
    if "messages" in fields and "prompt" in fields:
        raise ValueError("exactly one of 'prompt' and 'messages' is needed; both are given")
    if "messages" in fields:
        messages = messages_of(fields["messages"], "messages")
    elif isinstance(fields.get("prompt"), list):
        messages = messages_of(fields["prompt"], "prompt")
    else:
        messages = [{"role": "user", "content": text_of(fields, "prompt", row)}]
    has_system = messages[0]["role"] == "system"
    if "system" in fields:
        if has_system:
            raise ValueError("'system' and a system message in 'messages' are both given; leave one of them out")
        if not isinstance(fields["system"], str):
            raise ValueError(f"'system' = {brief(fields['system'])} is not valid; a text is needed")
        system = fields["system"] or None
    return messages if has_system or system is None else [{"role": "system", "content": system}, *messages]


def asked_text(messages: Sequence[Message]) -> str:
    """The question as one text: all but the system text."""
    return "\n\n".join(str(message.get("content") or "") for message in messages if message["role"] != "system")


def split_turns(messages: Sequence[Message], last_only: bool) -> tuple[list[Message], list[Message]]:
    """A conversation that ends with an answer, cut before the first answer to the user, or before the last answer.

    >>> said = [{"role": role, "content": "…"} for role in ("user", "assistant", "user", "assistant")]
    >>> [len(part) for part in split_turns(said, last_only=False)], [len(part) for part in split_turns(said, last_only=True)]
    ([1, 3], [3, 1])

    Raises:
        ValueError: it ends otherwise.
    """
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    if not _is_answer(messages[-1]) or first >= len(roles) - 1:
        raise ValueError(
            f"'messages' ends with one of {roles[-1]!r}; a text of {ANSWERS} behind a question is needed, or an 'answer'"
        )
    cut = len(roles) - 1 if last_only else roles.index("assistant", first)
    return list(messages[:cut]), list(messages[cut:])


def answers_of(value: object, key: str, asked: Sequence[Message]) -> list[Message]:
    """The turns behind `asked`: a text; or messages, with or without those of `asked` before them.

    Raises:
        ValueError: no text, malformed messages, or some that do not begin and end with an answer.
    """
    if not isinstance(value, list):
        return [{"role": "assistant", "content": text_of({key: value}, key)}]
    messages = messages_of(value, key)
    without_system = asked[1:] if asked[0]["role"] == "system" else asked
    for before in (asked, without_system):
        if messages[: len(before)] == list(before):
            messages = messages[len(before) :]
            break
    if not messages or messages[0]["role"] != "assistant" or not _is_answer(messages[-1]):
        raise ValueError(
            f"{key!r} has messages of {[message['role'] for message in messages]} behind the prompt; the first and the last "
            f"must be of {ANSWERS}"
        )
    return messages


def shared_turns(chosen: object, rejected: object) -> list[Message]:
    """The beginning that two conversations share: the prompt of a pair without one.

    Raises:
        ValueError: malformed messages, or none in common.
    """
    both = [messages_of(value, key) for key, value in (("chosen", chosen), ("rejected", rejected))]
    count = 0
    for one, other in zip(*both, strict=False):
        if one != other:
            break
        count += 1
    if count == 0:
        raise ValueError(
            "'chosen' and 'rejected' begin with different messages; without a 'prompt' both begin with the same question"
        )
    return both[0][:count]


def messages_of(value: object, key: str) -> list[Message]:
    """Check a list of messages, and return it without null keys.

    Parquet gives every message of a file the keys of all: a template that tests for a key must not find a null.

    Raises:
        ValueError: anything else; names the message.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key!r} = {brief(value)} is not valid; a list of {{role, content}} is needed")
    messages = [without_nulls(message) for message in value]
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{key}[{index}] = {brief(message)} is not valid; {{role, content}} is needed")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"{key}[{index}].content = {brief(content)} is not valid; a text is needed")
        if content is None and "content" in value[index]:
            messages[index] = {**message, "content": None}  # beside tool_calls a template may read it
    return messages


def without_nulls(value: object) -> Any:
    """Copy a JSON value without its null keys, at every depth.

    >>> without_nulls({"role": "user", "name": None, "parts": [{"text": "hi", "url": None}, None]})
    {'role': 'user', 'parts': [{'text': 'hi'}, None]}
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("content") or message.get("tool_calls"))
