"""Words of the package: a docstring begins with a verb, in one line of at most 100 characters."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "parallel_rl"
NO_VERB = re.compile(
    "A|All|An|And|Any|As|Both|By|Each|Every|Everything|For|From|How|If|In|Its|Of|On|One|Same|Some|Such|That|The|These|This|Those"
    "|To|What|Whatever|When|Where|Whether|Which|Who|Whose|With|Without"
)
LONGEST = 100


@cache
def nodes_of(path: Path) -> tuple[list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef], list[ast.Raise]]:
    """List what a file defines, and what it raises."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    made = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    return made, [node for node in nodes if isinstance(node, ast.Raise)]


def docstrings(path: Path) -> list[tuple[str, str]]:
    """List (place, docstring) of the functions and classes of a file."""
    nodes = [node for node in nodes_of(path)[0] if ast.get_docstring(node)]
    return [
        (
            f"{'class ' * isinstance(node, ast.ClassDef)}{path.relative_to(PACKAGE)}:{node.lineno} {node.name}",
            ast.get_docstring(node) or "",
        )
        for node in nodes
    ]


def fault(place: str, text: str) -> str:
    """Name what is wrong with the first line of a docstring, or return ""."""
    first = text.splitlines()[0]
    word = first.split()[0].rstrip(".,:")
    if len(first) > LONGEST:
        return f"{len(first)} characters in the first line; at most {LONGEST}"
    if not first.rstrip().endswith((".", "?", ":")):
        return "the first line does not end its sentence"
    if not place.startswith("class ") and NO_VERB.fullmatch(word):
        return f"begins with {word!r}; begin with a verb"
    return ""


def test_docstrings_begin_with_a_verb() -> None:
    texts = [pair for path in sorted(PACKAGE.rglob("*.py")) for pair in docstrings(path)]
    faults = [f"{place}: {wrong}" for place, text in texts if (wrong := fault(place, text))]
    assert not faults, "\n".join(faults)


MESSAGE, SENTENCES = 300, 2  # constant characters and sentences of a raised message


def messages(path: Path) -> list[tuple[str, str]]:
    """List (place, constant text) of the messages that a file raises."""
    raised = nodes_of(path)[1]
    specs = {id(part) for node in raised for value in ast.walk(node) if isinstance(value, ast.FormattedValue)
             for part in ast.walk(value.format_spec or value)}  # fmt: skip
    return [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", "".join(texts))
        for node in raised
        if (texts := [part.value for part in ast.walk(node)
                      if isinstance(part, ast.Constant) and isinstance(part.value, str) and id(part) not in specs])
    ]  # fmt: skip


def test_messages_are_short() -> None:
    texts = [pair for path in sorted(PACKAGE.rglob("*.py")) for pair in messages(path)]
    long = [
        f"{place}: {text}"
        for place, text in texts
        if len(text) > MESSAGE or len(re.findall(r"[.!?] [A-Z]", text)) >= SENTENCES
    ]
    assert not long, "\n".join(long)


def test_no_docstring_begins_with_a_relative_clause() -> None:
    clause = re.compile(r'^ *"""(?:What|Where|Which|Who|Whose|Of|Those|That) .*', re.M)
    lines = {str(path): clause.findall(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: some for path, some in lines.items() if some} == {}


PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "slurm/*.md", "benchmarks/*.md", "examples/**/*.md")
    for page in sorted(PACKAGE.parent.glob(pattern))
    if page.name not in ("api.md", "command_line.md")  # the site's, made from docstrings
]
MOST_WORDS = 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PACKAGE.parent)))
def test_sentences_of_a_page_are_short(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"^( {4,}|\s*\||#).*$", "", text, flags=re.M)  # blocks, tables, headings
    text = re.sub(r"\]\([^)]*\)", "]", text)
    paragraphs = re.split(r"\n\s*\n|\n *(?:- |\d+\. )", text)
    sentences = [one for part in paragraphs for one in re.split(r"(?<=[.!?:])[)\"*]*\s+", " ".join(part.split()))]
    words = [[word for word in sentence.split() if not word.startswith(("`", "[`"))] for sentence in sentences]
    long = [sentence for sentence, own in zip(sentences, words, strict=True) if len(own) > MOST_WORDS]
    assert not long, f"split into sentences of at most {MOST_WORDS} words: {long}"
