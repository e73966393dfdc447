"""Protocol of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# "role" and "content", and whatever else a chat template reads
Message = Mapping[str, object]
# the schemas of the functions that a conversation may call, as a chat template takes them
Tools = Sequence[Mapping[str, object]] | None


@dataclass(frozen=True)
class Vocabulary:
    """The token ids that a policy draws from: [0, size), of which each of `ends` ends an answer and `pad` fills rows up."""

    size: int
    ends: frozenset[int]
    pad: int = 0


@dataclass(frozen=True)
class Target:
    """The ids that a policy is to produce after a prompt, with the end token.

    Attributes:
        tokens: ids.
        mask: 1 for each that the policy says, 0 for what others say between its turns; None: all are 1.
    """

    tokens: tuple[int, ...]
    mask: tuple[int, ...] | None = None


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone, nothing before it or behind it.

        Raises:
            ValueError: it cannot be written in this vocabulary.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """The text up to the first end token; special tokens are left out."""

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The ids of a conversation, up to where the policy begins to answer.

        Raises:
            ValueError: messages that this tokenizer or its chat template has no form for.
        """

    def target(self, messages: Sequence[Message], answers: Sequence[Message], tools: Tools = None) -> Target:
        """The ids that follow those of `render(messages)` in the conversation of both.

        Args:
            messages: the prompt.
            answers: behind it, the first and the last of the assistant; each turn of the assistant is to be learned, but
                those with `weight` 0.
            tools: as for `render`.

        Raises:
            ValueError: as `render`, or an answer that does not continue the conversation.
        """

    def document(self, text: str) -> list[int]:
        """The ids of a text that is no conversation, with what begins and ends one."""


def plain_text(messages: Sequence[Message], why: str, tools: Tools = None) -> str:
    """The text of a conversation that is a single message of the user.

    Args:
        messages: the conversation.
        why: no other has a form, for the message.
        tools: must be None.

    Raises:
        ValueError: it has other messages, or tools.
    """
    if tools is not None:
        raise ValueError(f"{why}; tools need a chat template")
    return _only(messages, "user", why)


def plain_answer(messages: Sequence[Message], why: str) -> str:
    """The text of the one answer; as `plain_text`.

    Raises:
        ValueError: there are other messages.
    """
    return _only(messages, "assistant", why)


def _only(messages: Sequence[Message], role: str, why: str) -> str:
    roles = [message.get("role") for message in messages]
    text = messages[0].get("content") if len(messages) == 1 else None
    if roles != [role] or not isinstance(text, str):
        raise ValueError(f"{why}; one text of the {role} is needed, and there are messages of {roles}")
    return text
