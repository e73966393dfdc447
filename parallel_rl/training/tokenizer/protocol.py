"""Protocol of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# "role", "content", and other keys that a chat template reads
Message = Mapping[str, object]
# the schemas of callable functions, as a chat template takes them
Tools = Sequence[Mapping[str, object]] | None


@dataclass(frozen=True)
class Vocabulary:
    """Token ids [0, size) that a policy samples; each of `ends` ends an answer, `pad` pads rows."""

    size: int
    ends: frozenset[int]
    pad: int = 0


@dataclass(frozen=True)
class Target:
    """Token ids that a policy is to produce after a prompt, with the end token.

    `mask` is 1 for the policy's tokens, 0 for others' turns between; None: all are 1.
    """

    tokens: tuple[int, ...]
    mask: tuple[int, ...] | None = None


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def encode(self, text: str) -> list[int]:
        """Encode `text` alone, without special tokens; ValueError if the vocabulary cannot."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decode up to the first end token, without special tokens."""

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Encode a conversation, up to where the policy begins to answer; ValueError if it has no form."""

    def target(self, messages: Sequence[Message], answers: Sequence[Message], tools: Tools = None) -> Target:
        """Encode the continuation of `render(messages)` by the answers.

        The first and the last of `answers` are the assistant's; each of its turns trains, unless its `weight` is 0.
        ValueError as in `render`, or for an answer that does not continue the conversation.
        """

    def document(self, text: str) -> list[int]:
        """Encode a text that is no conversation, with begin and end tokens."""


def plain_text(messages: Sequence[Message], why: str, tools: Tools = None) -> str:
    """Return the text of a single user message; ValueError with `why` for other messages or tools."""
    if tools is not None:
        raise ValueError(f"{why}; tools need a chat template")
    return _only(messages, "user", why)


def plain_answer(messages: Sequence[Message], why: str) -> str:
    """Return the text of the one answer; ValueError for other messages."""
    return _only(messages, "assistant", why)


def _only(messages: Sequence[Message], role: str, why: str) -> str:
    roles = [message.get("role") for message in messages]
    text = messages[0].get("content") if len(messages) == 1 else None
    if roles != [role] or not isinstance(text, str):
        raise ValueError(f"{why}; one text of the {role} is needed, and there are messages of {roles}")
    return text
