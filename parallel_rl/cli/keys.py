"""The keys of a run's config on the command line: type, default, description, and where the value comes from."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from parallel_rl.cli.runs import importing, refuse, show, source
from parallel_rl.config.strict import Variants, nearest


@dataclasses.dataclass(frozen=True)
class _Key:
    """A key of a section, or of the variants of a family that share it."""

    variants: tuple[str, ...]
    values: str
    default: str
    about: str
    sections: tuple[type, ...]


def describe(root: type, dotted: str) -> str:
    """Describe a dotted key or section; ValueError with the nearest one if there is none."""
    section, keys = root, dotted.split(".")
    for depth, key in enumerate(keys):
        valid, here = _keys(section), ".".join(keys[: depth + 1])
        if key not in valid:
            where = f" in {'.'.join(keys[:depth])}" if depth else ""
            raise ValueError(f"there is no key {key!r}{where}; {nearest(key, valid)}")
        sections = [section for entry in valid[key] for section in entry.sections]
        if depth == len(keys) - 1:
            break
        if not sections:
            cure = (
                "docs/reference/losses lists its options"
                if key == "options"
                else f"its value is {valid[key][0].values}"
            )
            raise ValueError(f"{here} has no keys of its own here; {cure}")
        section = sections[0]
    lines = [dotted, *(line for entry in valid[key] for line in _entry(entry, section))]
    for below in sections:
        lines += ["", *_section(below)]
    return "\n".join(lines).replace("`", "").rstrip()


def _keys(section: type) -> dict[str, list[_Key]]:
    classes: dict[str, type] = section.variants if is_family(section) else {"": section}
    keys: dict[str, list[_Key]] = {}
    for variant, cls in classes.items():
        hints, texts = typing.get_type_hints(cls), described(cls)
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            key = _Key(
                (variant,), type_text(hint), default_text(field), texts.get(field.name, ""), tuple(sections_of(hint))
            )
            entries = keys.setdefault(field.name, [])
            alike = [entry for entry in entries if dataclasses.replace(entry, variants=key.variants) == key]
            if alike:
                entries[entries.index(alike[0])] = dataclasses.replace(key, variants=(*alike[0].variants, variant))
            else:
                entries.append(key)
    return keys


def _entry(key: _Key, section: type) -> typing.Iterator[str]:
    yield f"  values: {key.values}"
    yield f"  default: {key.default}"
    if key.about:
        yield f"  {key.about}"
    if only := _only(key, section):
        yield f"  with name: {only}"


def _section(section: type) -> typing.Iterator[str]:
    if is_family(section):
        yield f"  name: {', '.join(sorted(section.variants))}"
    elif text := about(section):
        yield f"  {text}"
    entries = [(name, key) for name, entries in _keys(section).items() for key in entries]
    for name, key in sorted(entries, key=lambda entry: _only(entry[1], section)):
        only = f"; with name: {_only(key, section)}" if _only(key, section) else ""
        yield f"  {name} ({key.values}; default {key.default}{only}){f': {key.about}' if key.about else ''}"


def _only(key: _Key, section: type) -> str:
    """Name the variants that have a key, or return "" if all have it."""
    return ", ".join(key.variants) if is_family(section) and len(key.variants) < len(section.variants) else ""


def is_family(section: type) -> typing.TypeGuard[type[Variants]]:
    """Return whether a class is a family of variants that a name chooses from."""
    return issubclass(section, Variants) and not hasattr(section, "name")


def sections_of(hint: object) -> list[type]:
    """List the sections that a field may hold: dataclasses and families of variants."""
    classes = [cls for cls in (hint, *typing.get_args(hint)) if isinstance(cls, type)]
    return [cls for cls in classes if dataclasses.is_dataclass(cls) or issubclass(cls, Variants)]


def about(section: type) -> str:
    """Return what a section is for: its docstring up to the descriptions of its keys."""
    text, marks = marks_of(section)
    return (text[: marks[0].start()] if marks else text).replace("Attributes:", "").strip()


def described(cls: type) -> dict[str, str]:
    """Read the fields' descriptions ("name: ...") from the docstrings of a class and its bases."""
    texts: dict[str, str] = {}
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base):
            texts = _described(base) | texts
    return texts


def _described(cls: type) -> dict[str, str]:
    text, marks = marks_of(cls)
    texts: dict[str, str] = {}
    for index, mark in enumerate(marks):
        end = marks[index + 1].start() if index + 1 < len(marks) else len(text)
        words = re.split(r"\s(?:Papers?: |Attributes:)", text[mark.end() : end])[0].strip()
        for name in mark[1].split(", "):
            texts.setdefault(name, words)
    return texts


def marks_of(cls: type) -> tuple[str, list[re.Match[str]]]:
    """Return the docstring in one line, with a match for each description."""
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    name = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "$^"
    text = " ".join((inspect.getdoc(cls) or "").split())
    return text, list(re.finditer(rf"(?<![\w.`])((?:{name})(?:, (?:{name}))*): ", text))


def default_text(field: dataclasses.Field) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, Variants):
        return f"`{value.name}`"
    if dataclasses.is_dataclass(value):
        return "its defaults"
    if isinstance(value, str):
        return f"`{value}`".replace("\n", "\\n")
    return {None: "`null`", True: "true", False: "false"}.get(value, f"`{value}`") if _plain(value) else f"`{value}`"


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool)


def type_text(hint: object) -> str:
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
    if isinstance(hint, type) and sections_of(hint):
        return "name or section" if is_family(hint) else "section"
    names = {float: "number", int: "integer", bool: "true, false", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))  # type: ignore[call-overload]


def help_of(key: str) -> int:
    """Print type, default and description of a key or section; return the exit status."""
    with importing():
        from parallel_rl.training.config.train import TrainConfig

    try:
        show(describe(TrainConfig, key.removeprefix("--")))
    except ValueError as error:
        return refuse(error)
    return 0


def print_config(recipe: str | None, rest: Sequence[str]) -> int:
    """Print a run's whole config as YAML, each value with its source; return the exit status."""
    with importing():
        from parallel_rl.config.yaml_files import Tree, override, read_layers
        from parallel_rl.training.config.load import as_mapping, load_config

    try:
        path, overrides = source(recipe, rest, "train")
        config = load_config(path, overrides)
        overridden: Tree = {}
        override(overridden, overrides)
        layers = [
            ("command line", overridden),
            *((file.name, tree) for file, tree in reversed(read_layers(Path(path)))),
        ]
    except ValueError as error:
        return refuse(error)
    show("\n".join(_lines(as_mapping(config), (), layers)))
    return 0


def _lines(
    tree: Mapping[str, object], path: tuple[str, ...], layers: Sequence[tuple[str, Mapping[str, object]]]
) -> Iterator[str]:
    import yaml

    for key, value in tree.items():
        here, indent = (*path, str(key)), "  " * len(path)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, here, layers)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
            text = text.removesuffix("\n").removesuffix("\n...")
            yield f"{indent}{key}: {text}  # {_source(here, layers)}"


def _source(path: tuple[str, ...], layers: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    """Name the topmost layer that sets a key, or replaces a section around it by a plain value."""
    for name, tree in layers:
        at: object = tree
        for key in path:
            if not isinstance(at, Mapping) or key not in at:
                break
            at = at[key]
            if not isinstance(at, Mapping):
                return name
        else:
            return name
    return "default"
