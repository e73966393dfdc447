"""A character-level tokenizer over a configured alphabet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallel_rl.training.tokenizer.protocol import Message, Target, Tools, Vocabulary, plain_answer, plain_text

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
