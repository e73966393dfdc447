"""Protocol of a tokenizer, and its simplest kind: one token per character of an alphabet."""

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


_PAD, _BEGIN, _END = 0, 1, 2
_SPECIAL = 3
_NO_FORM = "the character tokenizer cannot write a conversation"


class CharTokenizer:
    """Tokenizer with ids 0, 1, 2 for padding, begin and end, and 3 + i for character i of the alphabet.

    ValueError for an empty alphabet or one with a character twice.

    >>> CharTokenizer("ab").document("ba")
    [1, 4, 3, 2]
    """

    def __init__(self, alphabet: str) -> None:
        if not alphabet:
            raise ValueError(
                "tokenizer.alphabet = '' is empty; list every character that the data uses, or write 'auto'"
            )
        twice = [char for index, char in enumerate(alphabet) if char in alphabet[:index]]
        if twice:
            raise ValueError(f"tokenizer.alphabet = {alphabet!r} has the character {twice[0]!r} twice")
        self.alphabet = alphabet
        self.vocabulary = Vocabulary(_SPECIAL + len(alphabet), frozenset({_END}), _PAD)
        self._ids = {char: _SPECIAL + index for index, char in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        """Encode `text`; ValueError names all characters outside the alphabet."""
        missing = [char for char in dict.fromkeys(text) if char not in self._ids]
        if missing:
            what = f"the character{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
            raise ValueError(
                f"{what} of {text!r} {'are' if len(missing) > 1 else 'is'} not in tokenizer.alphabet = {self.alphabet!r}"
            )
        return [self._ids[char] for char in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode up to the first end token, without padding and begin tokens."""
        text = []
        for token in ids:
            if token == _END:
                break
            if token >= _SPECIAL:
                text.append(self.alphabet[token - _SPECIAL] if token < self.vocabulary.size else "\ufffd")
        return "".join(text)

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        return [_BEGIN, *self.encode(plain_text(messages, _NO_FORM, tools))]

    def target(self, messages: Sequence[Message], answers: Sequence[Message], tools: Tools = None) -> Target:
        return Target((*self.encode(plain_answer(answers, _NO_FORM)), _END))

    def document(self, text: str) -> list[int]:
        return [_BEGIN, *self.encode(text), _END]
