"""Conversations of records: the prompt, and the assistant's turns after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from parallel_rl.config.json_text import brief, parse_json
from parallel_rl.config.strict import closest
from parallel_rl.training.data.format import Row, text_of
from parallel_rl.training.tokenizer.protocol import Message, Tools

ANSWERS = "'assistant'"
_KEYS = frozenset({"role", "content", "weight", "tool_calls", "tool_call_id", "name", "reasoning_content", "thinking"})


def conversation(fields: Row, system: str | None, row: Row | None = None) -> list[Message]:
    """Return a record's messages, the system text first; a text as `prompt` becomes the user's.

    ValueError if neither or both of `messages` and `prompt` are given, for a malformed message, or two system texts.
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


def tools_of(fields: Row) -> Tools:
    """Return the schemas of a record's tools, from a list or a JSON text; ValueError for anything else."""
    tools = fields.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ValueError(f"'tools' = {brief(tools)} is no JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"'tools' = {brief(tools)} is not valid; a list of schemas, or its JSON text, is needed")
    return [without_nulls(tool) for tool in tools]


def asked_text(messages: Sequence[Message]) -> str:
    """Return the question as one text: all but the system text."""
    return "\n\n".join(str(message.get("content") or "") for message in messages if message["role"] != "system")


def split_turns(messages: Sequence[Message], last_only: bool) -> tuple[list[Message], list[Message]]:
    """Split before the first answer to the user, or before the last; ValueError if no answer is last.

    >>> talk = [{"role": role, "content": "…"} for role in ("user", "assistant", "user", "assistant")]
    >>> [len(part) for part in split_turns(talk, last_only=False)], [len(part) for part in split_turns(talk, last_only=True)]
    ([1, 3], [3, 1])
    """
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    if not _is_answer(messages[-1]) or first >= len(roles) - 1:
        raise ValueError(
            f"'messages' ends with one of {roles[-1]!r}; a text of {ANSWERS} after a question is needed, or an 'answer'"
        )
    cut = len(roles) - 1 if last_only else roles.index("assistant", first)
    return list(messages[:cut]), list(messages[cut:])


def answers_of(value: object, key: str, prompt: Sequence[Message]) -> list[Message]:
    """Return the turns after `prompt`, from a text or from messages that may repeat it.

    ValueError for malformed messages, or if the first or the last is no answer.
    """
    if not isinstance(value, list):
        return [{"role": "assistant", "content": text_of({key: value}, key)}]
    messages = messages_of(value, key)
    without_system = prompt[1:] if prompt[0]["role"] == "system" else prompt
    for before in (prompt, without_system):
        if messages[: len(before)] == list(before):
            messages = messages[len(before) :]
            break
    if not messages or messages[0]["role"] != "assistant" or not _is_answer(messages[-1]):
        raise ValueError(
            f"{key!r} has messages of {[message['role'] for message in messages]} after the prompt; the first and the last "
            f"must be of {ANSWERS}"
        )
    return messages


def shared_turns(chosen: object, rejected: object) -> list[Message]:
    """Return the common beginning of two conversations; ValueError if none, or for a malformed message."""
    both = [messages_of(value, key) for key, value in (("chosen", chosen), ("rejected", rejected))]
    count = 0
    for first, second in zip(*both, strict=False):
        if first != second:
            break
        count += 1
    if count == 0:
        raise ValueError(
            "'chosen' and 'rejected' begin with different messages; without a 'prompt' both begin with the same question"
        )
    return both[0][:count]


def messages_of(value: object, key: str) -> list[Message]:
    """Check a list of messages, and return it as chat templates expect it; ValueError names a bad one.

    Null keys are removed: Parquet gives every message the keys of all, and a template may test for a key. Text parts
    become one text, a line each, and the arguments of a tool call a mapping.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key!r} = {brief(value)} is not valid; a list of {{role, content}} is needed")
    messages = [without_nulls(message) if isinstance(message, Mapping) else message for message in value]
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{key}[{index}] = {brief(message)} is not valid; {{role, content}} is needed")
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], f"{key}[{index}]")
        for name in message.keys() - _KEYS:
            if (meant := _meant(str(name))) is not None:
                raise ValueError(f"{key}[{index}] has the unknown key {name!r}; did you mean {meant!r}?")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"{key}[{index}].content = {brief(content)} is not valid; a text is needed")
        if content is None and "content" in value[index]:
            message["content"] = None  # beside tool_calls a template may read it
        weight = message.get("weight", 1)
        if weight not in (0, 1) or (weight == 0 and message["role"] != "assistant"):
            raise ValueError(f"{key}[{index}].weight = {weight!r} is not valid; 0 or 1, in a message of the assistant")
        for call in message.get("tool_calls") or ():
            _read_arguments(call, f"{key}[{index}]")
    return messages


@lru_cache(maxsize=256)
def _meant(key: str) -> str | None:
    return closest(key, _KEYS, cutoff=0.8)


def unknown_keys(row: Row) -> list[str]:
    """List the keys of a record's messages that only the chat template may know.

    >>> unknown_keys({"messages": [{"role": "user", "content": "hi", "train": False}], "id": 7})
    ['train']
    """
    keys: dict[str, None] = {}
    for value in row.values():
        messages = value if isinstance(value, list) else []
        for message in messages:
            if isinstance(message, Mapping) and "role" in message:
                keys |= dict.fromkeys(str(key) for key, x in message.items() if key not in _KEYS and x is not None)
    return list(keys)


def _joined(parts: list[object], where: str) -> str:
    """Join the parts of a message into one text, a line each, as vLLM does."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise ValueError(
                f"{where}.content has the part {brief(part)}; only texts, {{type: text, text}}, can be read"
            )
        texts.append(text)
    return "\n".join(texts)


def _read_arguments(call: object, where: str) -> None:
    """Parse the JSON text of a tool call's arguments in place."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
        try:
            function["arguments"] = parse_json(text)
        except ValueError as error:
            raise ValueError(f"{where}.tool_calls: the arguments {text[:80]!r} are no JSON: {error}") from None


def without_nulls(value: object) -> Any:
    """Copy a JSON value without its null keys, at every depth.

    >>> without_nulls({"role": "user", "name": None, "parts": [{"text": "hi", "url": None}, None]})
    {'role': 'user', 'parts': [{'text': 'hi'}, None]}
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def is_empty(answer: object) -> bool:
    """Return whether an answer is an empty text, or ends with an empty message."""
    last = answer[-1] if isinstance(answer, list) and answer else answer
    if isinstance(last, Mapping):
        return last.get("role") == "assistant" and not last.get("content") and not last.get("tool_calls")
    return last in ("", [])


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("content") or message.get("tool_calls"))
