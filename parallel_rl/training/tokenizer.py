"""A character-level tokenizer over a configured alphabet."""

from __future__ import annotations

from collections.abc import Iterable

PAD, BOS, EOS = 0, 1, 2
SPECIAL = 3


class CharTokenizer:
    """Ids 0, 1, 2 are padding, begin and end; character i of the alphabet is 3 + i.

    Raises:
        ValueError: an empty alphabet or one with a character twice.
    """

    def __init__(self, alphabet: str) -> None:
        if not alphabet:
            raise ValueError("tokenizer.alphabet = '' is empty; list every character that the data uses")
        twice = [char for index, char in enumerate(alphabet) if char in alphabet[:index]]
        if twice:
            raise ValueError(f"tokenizer.alphabet = {alphabet!r} has the character {twice[0]!r} twice")
        self.alphabet = alphabet
        self._ids = {char: SPECIAL + index for index, char in enumerate(alphabet)}

    @property
    def vocab_size(self) -> int:
        return SPECIAL + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """The ids of the characters of `text`.

        Raises:
            ValueError: a character outside the alphabet.
        """
        try:
            return [self._ids[char] for char in text]
        except KeyError as error:
            char = error.args[0]
            raise ValueError(
                f"the character {char!r} of {text!r} is not in tokenizer.alphabet = {self.alphabet!r}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text up to the first end token; padding and begin tokens are left out."""
        text = []
        for token in ids:
            if token == EOS:
                break
            if token >= SPECIAL:
                text.append(self.alphabet[token - SPECIAL] if token < self.vocab_size else "\ufffd")
        return "".join(text)

    def prompt(self, text: str) -> list[int]:
        """Begin, then the characters."""
        return [BOS, *self.encode(text)]

    def completion(self, text: str) -> list[int]:
        """The characters, then end."""
        return [*self.encode(text), EOS]
