"""Records in TRL's forms, for `tools.trl_golden` and the test of its ids: texts, and conversations of all kinds."""

from __future__ import annotations

from collections.abc import Mapping

Records = dict[str, dict[str, object]]  # by case

# the tokenizer's folder, and whether records are conversations
TOKENIZERS: Mapping[str, tuple[str, bool]] = {
    "qwen3, texts": ("qwen3", False),
    "llama3, texts": ("llama3", False),
    "qwen3, messages": ("qwen3", True),
    "chatml, messages": ("chatml", True),
    "llama3, messages": ("llama3", True),
}
WORD_IN_TWO = "a word in two parts"
_TEXTS = {
    WORD_IN_TWO: ("How many app", "les are left?", "les were given?"),
    "one line": ("How many apples are left?", " There are 7 left.", " The sum is 42."),
    "several lines": ("A farmer has 12 apples.\n\nHow many?", "\nThere are\n\n7.", "\n12 and 30"),
    "CRLF": ("A farmer has 12 apples.\r\nHow many?", " There are\r\n7 left.", " The sum is 42.\r\n"),
    "right to left": ("كم تفاحة بقيت؟", " שבעה 7 תפוחים", " ٤٢"),
}


def _said(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": text}


_TALKS = {
    "one turn": ([_said("user", "How many apples are left?")], "There are 7 left.", "The sum is 42."),
    "a system text": (
        [_said("system", "You are careful."), _said("user", "The sum of 12 and 30?")],
        "The sum is 42.",
        "It is 21",
    ),
    "several turns": (
        [
            _said("user", "A farmer has 12 apples."),
            _said("assistant", "<think>\nfirst\n</think>\n\nThen answer the question."),
            _said("user", "half of that?"),
        ],
        "half of that is 21.",
        "There are 7",
    ),
    "CRLF": ([_said("user", "Think first,\r\nthen answer.")], "There are\r\n7 left.", "7\r\n\r\n42"),
    "right to left": ([_said("user", "كم تفاحة بقيت؟")], "שבעה 7 תפוחים", "٤٢"),
}


def prompt_completions(messages: bool) -> Records:
    """List records of prompt and completion."""
    if messages:
        return {
            case: {"prompt": asked, "completion": [_said("assistant", good)]}
            for case, (asked, good, _) in _TALKS.items()
        }
    return {case: {"prompt": asked, "completion": good} for case, (asked, good, _) in _TEXTS.items()}


def conversations(messages: bool) -> Records:
    """List records of whole conversations, of which each answer is learned."""
    if not messages:
        return {}
    return {case: {"messages": [*asked, _said("assistant", good)]} for case, (asked, good, _) in _TALKS.items()}


def pairs(messages: bool) -> Records:
    """List records of prompt, chosen and rejected."""
    if messages:
        return {
            case: {"prompt": asked, "chosen": [_said("assistant", good)], "rejected": [_said("assistant", bad)]}
            for case, (asked, good, bad) in _TALKS.items()
        }
    return {case: {"prompt": asked, "chosen": good, "rejected": bad} for case, (asked, good, bad) in _TEXTS.items()}


def implicit_pairs(messages: bool) -> Records:
    """List pairs of whole conversations, without a prompt."""
    if not messages:
        return {}
    return {
        case: {side: [*asked, _said("assistant", answer)] for side, answer in (("chosen", good), ("rejected", bad))}
        for case, (asked, good, bad) in _TALKS.items()
    }


def answers(messages: bool) -> Records:
    """List records of prompt, completion and label."""
    records = prompt_completions(messages)
    return {case: {**record, "label": number % 2 == 0} for number, (case, record) in enumerate(records.items())}


def solutions(messages: bool) -> Records:
    """List records of prompt, steps and their labels, which are texts in TRL."""
    if messages:
        return {}
    return {
        case: {"prompt": asked, "completions": [good, bad, good], "labels": [True, False, True]}
        for case, (asked, good, bad) in _TEXTS.items()
    }


FORMS = {
    "prompt_completion": prompt_completions,
    "messages": conversations,
    "pairs": pairs,
    "implicit_pairs": implicit_pairs,
    "answers": answers,
    "solutions": solutions,
}
SEPARATOR = "\n"
