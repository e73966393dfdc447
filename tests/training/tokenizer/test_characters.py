"""The tokenizer of characters."""

from __future__ import annotations

import pytest

from parallel_rl.training.tokenizer.protocol import CharTokenizer

TOKENIZER = CharTokenizer("0123456789+=")


def asking(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def test_ids_are_those_of_earlier_checkpoints() -> None:
    assert TOKENIZER.render(asking("1+2=")) == [1, 4, 13, 5, 14]
    assert TOKENIZER.target(asking("1+2="), [{"role": "assistant", "content": "3"}]).tokens == (6, 2)
    assert TOKENIZER.document("1+2=3") == [1, 4, 13, 5, 14, 6, 2]
    vocabulary = TOKENIZER.vocabulary
    assert (vocabulary.size, vocabulary.ends, vocabulary.pad) == (15, {2}, 0)
    assert (
        TOKENIZER.decode([1, *TOKENIZER.encode("12=3"), 2, 4, 0]) == "12=3" and TOKENIZER.decode([4, 99]) == "1\ufffd"
    )


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"the characters '-', 'x' of '1-x-2' are not in tokenizer.alphabet"):
        TOKENIZER.encode("1-x-2")
    with pytest.raises(ValueError, match="has the character '1' twice"):
        CharTokenizer("121")
    with pytest.raises(ValueError, match="is empty"):
        CharTokenizer("")
    with pytest.raises(ValueError, match=r"cannot write a conversation; .* messages of \['system', 'user'\]"):
        TOKENIZER.render([{"role": "system", "content": "1"}, *asking("2")])
    with pytest.raises(
        ValueError, match=r"one text of the assistant is needed, .* \['assistant', 'user', 'assistant'\]"
    ):
        TOKENIZER.target(asking("1"), [{"role": role, "content": "2"} for role in ("assistant", "user", "assistant")])
