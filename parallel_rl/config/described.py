"""Keys of a config in words: type, default and description, read from its dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing

from parallel_rl.config.strict import Variants, nearest


def describe(root: type, dotted: str) -> str:
    """Describe the key or section `dotted` of the config `root`; ValueError names the nearest key."""
    cls, about = root, ""
    for depth, key in enumerate(keys := dotted.split(".")):
        hints = typing.get_type_hints(cls)
        if key not in hints:
            where = f" in {'.'.join(keys[:depth])}" if depth else ""
            raise ValueError(f"there is no key {key!r}{where}; {nearest(key, hints)}")
        field = next(field for field in dataclasses.fields(cls) if field.name == key)
        about = f"{dotted}\n  values: {type_text(hints[key])}\n  default: {default_text(field)}\n"
        about += f"  {described(cls)[key]}\n" if key in described(cls) else ""
        below = [one for one in (hints[key], *typing.get_args(hints[key])) if isinstance(one, type)]
        families = [one for one in below if issubclass(one, Variants)]
        sections = [one for one in below if dataclasses.is_dataclass(one)]
        if depth == len(keys) - 1:
            break
        if families or not sections:
            raise ValueError(
                f"{'.'.join(keys[: depth + 1])} has no keys of its own here; docs/reference/losses lists its options"
            )
        cls = sections[0]
    for family in families:
        about += f"  name: {', '.join(sorted(family.variants))}\n"
    for section in sections:
        about += f"\n{_section(section)}"
    return about.replace("`", "").rstrip()


def _section(cls: type) -> str:
    hints, texts = typing.get_type_hints(cls), dict[str, str]()
    for base in (one for one in cls.__mro__ if dataclasses.is_dataclass(one)):
        texts = described(base) | texts
    lines = []
    for field in dataclasses.fields(cls):
        text = f": {texts[field.name]}" if field.name in texts else ""
        lines.append(f"  {field.name} ({type_text(hints[field.name])}; default {default_text(field)}){text}")
    return "\n".join(lines)


def described(cls: type) -> dict[str, str]:
    """Read the descriptions of a dataclass's fields from its docstring.

    They have the form "name: ...", or "name, other: ...".
    """
    text, marks = marks_of(cls)
    texts: dict[str, str] = {}
    for index, mark in enumerate(marks):
        end = marks[index + 1].start() if index + 1 < len(marks) else len(text)
        words = re.split(r"\s(?:Papers?: |Attributes:)", text[mark.end() : end])[0].strip()
        for name in mark[1].split(", "):
            texts.setdefault(name, words)
    return texts


def marks_of(cls: type) -> tuple[str, list[re.Match[str]]]:
    """Return the docstring in one line, and the match of each description in it."""
    names = [field.name for field in dataclasses.fields(cls)]
    one = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "$^"
    text = " ".join((inspect.getdoc(cls) or "").split())
    return text, list(re.finditer(rf"(?<![\w.`])((?:{one})(?:, (?:{one}))*): ", text))


def default_text(field: dataclasses.Field) -> str:
    """Format the default of a field."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, Variants):
        return f"`{value.name}`"
    if dataclasses.is_dataclass(value):
        return "its defaults"
    return {None: "`null`", True: "true", False: "false"}.get(value, f"`{value}`") if _plain(value) else f"`{value}`"


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool)


def type_text(hint: object) -> str:
    """Format the values that a field takes."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in args)
    if args and type(None) in args:
        return " or ".join(type_text(arg) for arg in args if arg is not type(None)) + " or `null`"
    if origin is dict:
        return "mapping"
    if args and origin not in (tuple, list):
        return " or ".join(type_text(arg) for arg in args)
    if args:
        return f"list of {type_text(args[0])}"
    names = {float: "number", int: "integer", bool: "true, false", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))  # type: ignore[call-overload]
