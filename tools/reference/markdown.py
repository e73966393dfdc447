"""Parts of a generated page: tables of options, variants of a family, formulas and papers from docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import yaml

from parallel_rl.cli.keys import about, default_text, described, type_text
from parallel_rl.config.strict import Variants

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def page(*parts: str) -> str:
    """Join the parts of a page, one blank line between them."""
    return "\n".join(part.strip("\n") + "\n" for part in parts if part.strip())


def table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(heading), "|" + "---|" * len(heading), *(line(row) for row in rows)]) + "\n"


def options_table(cls: type, skip: Iterable[str] = (), sections: Mapping[str, str] = MappingProxyType({})) -> str:
    """Describe the fields of a dataclass but those of `skip`; empty without any.

    The word "section" links to the address in `sections` for the field's name.
    """
    texts, hints = described(cls), typing.get_type_hints(cls)
    rows = [
        (
            f"`{field.name}`",
            default_text(field),
            type_text(hints[field.name]).replace("section", f"[section]({sections[field.name]})")
            if field.name in sections
            else type_text(hints[field.name]),
            texts.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)
        if field.name not in {*skip}
    ]
    return table(("option", "default", "values", "what it does"), rows) if rows else ""


def nested_options(config: type, elsewhere: Iterable[type] = ()) -> str:
    """Describe nested options, except classes with a page of their own."""
    parts = []
    for field, hint in typing.get_type_hints(config).items():
        for cls in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(cls) and isinstance(cls, type) and cls not in elsewhere:
                parts.append(f"`{field}` ({cls.__name__}): {about(cls)}\n\n{options_table(cls)}")
                parts.append(nested_options(cls, elsewhere))
    return page(*parts)


def variants(
    family: type[Variants], level: str, skip: Iterable[str] = (), pictures: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Write a section for each class of a family: sentence, formula, picture, papers, options."""
    parts = []
    for name, cls in family.variants.items():
        text = inspect.getdoc(cls) or ""
        parts += [f"{level} `{name}`", first_sentence(text), formula(text), pictures.get(name, "")]
        parts += [papers(text), options_table(cls, skip)]
    return page(*parts)


def first_sentence(text: str) -> str:
    """Return a docstring's first paragraph without its papers."""
    return re.split(r"\s*Papers?: ", text.split("\n\n", 1)[0].replace("\n", " "))[0]


def formula(text: str) -> str:
    """Return the first indented block of a docstring as a block of code."""
    found = re.search(r"\n\n((?:    .+\n)+)", text + "\n")
    return f"```text\n{inspect.cleandoc(found[1])}\n```" if found else ""


def papers(text: str) -> str:
    """Return the line of a docstring that names its papers, with links."""
    found = re.search(r"Papers?: (.+?)(?:\n\n|\Z)", text, re.S)
    return f"Paper: {linked(found[1])}." if found else ""


def linked(text: str) -> str:
    """Make links of arXiv's numbers."""
    text = " ".join(text.split()).rstrip(".")
    return re.sub(r"(?:arXiv )?\b(\d{4}\.\d{4,5})\b", r"[\1](https://arxiv.org/abs/\1)", text)


def flow(value: object) -> str:
    """Write a value as YAML in one line."""
    if not value:
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return f"`{text.replace('...', '').strip()}`"


def block(value: object) -> str:
    """Write a value as a block of YAML, its innermost mappings in one line each."""
    text = yaml.safe_dump(value, default_flow_style=None, sort_keys=False, width=100, allow_unicode=True)
    return f"```yaml\n{text.strip()}\n```"
