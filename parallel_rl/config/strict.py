"""Strict configuration: a dataclass from a mapping, or an error with key, value and cure."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import ClassVar, Literal, TypeVar, Union, get_args, get_origin

from parallel_rl.config.json_text import brief, is_int64
from parallel_rl.config.shown import shown

ConfigT = TypeVar("ConfigT")


def configure(cls: type[ConfigT], value: ConfigT | Mapping | str | None = None, where: str = "") -> ConfigT:
    """Make the dataclass `cls`, nested ones too, from an instance, a mapping or None (all defaults).

    >>> @dataclasses.dataclass(frozen=True)
    ... class Options:
    ...     beta: float = 0.1
    >>> configure(Options, {"beta": 1})
    Options(beta=1.0)
    >>> configure(Options, {"betta": 1}, "loss.options")
    Traceback (most recent call last):
    ValueError: unknown key loss.options.betta = 1 in Options; did you mean 'beta'?

    Args:
        cls: a dataclass, whose `__post_init__` checks keys against each other; or a family of `Variants`, chosen by name.
        value: an instance of `cls` (its fields' types are checked), a mapping of its field names, or None.
        where: dotted path of this value in the whole config, for the error messages.

    Raises:
        ValueError: unknown key (with the nearest valid one), missing required key, or a value of the wrong type.
    """
    if isinstance(cls, type) and issubclass(cls, Variants) and not hasattr(cls, "name"):
        return _choose(cls, value, where or cls.__name__)
    hints = _type_hints(cls)  # type: ignore[arg-type]  # a class is hashable
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    if isinstance(value, cls):
        # a dataclass itself takes anything for a Literal, and mappings for nested dataclasses
        values = {key: getattr(value, key) for key in fields}
        right = {key: _convert(hints[key], item, f"{where}.{key}" if where else key) for key, item in values.items()}
        return value if all(right[key] is values[key] for key in fields) else dataclasses.replace(value, **right)  # type: ignore[type-var]
    name = where or cls.__name__
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping or a {cls.__name__}, got {shown(value)}")
    kwargs = {}
    for key, item in (value or {}).items():
        path = f"{where}.{key}" if where else f"{key}"
        if key not in fields:
            near = _deeper(str(key), value or {}, hints) or nearest(str(key), fields)
            raise ValueError(f"unknown key {path} = {shown(item)} in {cls.__name__}; {near}")
        kwargs[key] = _convert(hints[key], item, path)
    required = [
        field.name
        for field in fields.values()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = [key for key in required if key not in kwargs]
    if missing:
        raise ValueError(f"{name} needs the key {missing[0]!r}, which is missing")
    try:
        return cls(**kwargs)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


@cache  # each annotation is compiled: more work than a small config itself
def _type_hints(cls: type) -> dict[str, typing.Any]:
    return typing.get_type_hints(cls)


class Variants:
    """Base of a family of config dataclasses; a config chooses one by its name.

        class Surrogate(Variants): ...
        @dataclass(frozen=True)
        class PPO(Surrogate, name="ppo"): clip_low: float = 0.2

    A field annotated `Surrogate` then takes an instance, a mapping {name: ppo, clip_low: 0.1}, or the name alone.
    """

    variants: ClassVar[dict[str, type]]
    name: ClassVar[str]

    def __init_subclass__(cls, name: str | None = None) -> None:
        if Variants in cls.__bases__:
            cls.variants = {}
        if name is None:  # the family itself, or what several of its variants share
            return
        if name in cls.variants:
            raise ValueError(f"{name!r} names {cls.variants[name].__name__} already")
        cls.name = name
        cls.variants[name] = cls


def nearest(key: str, valid: typing.Iterable[str]) -> str:
    """End an error message: the valid name closest to `key`, or all of them.

    >>> nearest("gpso", ["gspo", "dpo"])
    "did you mean 'gspo'?"
    """
    names = sorted(valid)
    close = closest(key, names)
    return f"did you mean {close!r}?" if close is not None else f"valid: {', '.join(names)}"


def closest(key: str, valid: typing.Iterable[str], cutoff: float = 0.5) -> str | None:
    """Find the valid name closest to `key` that shares at least `cutoff` of its letters."""
    names = sorted(valid)
    swapped = [name for name in names if sorted(name) == sorted(key)]  # a slip of the fingers
    close = swapped or difflib.get_close_matches(key, names, n=1, cutoff=cutoff)
    return close[0] if close else None


def _deeper(key: str, value: Mapping, hints: Mapping[str, typing.Any]) -> str:
    sections = [name for name, item in value.items() if isinstance(item, Mapping) and name in hints]
    kinds = {
        name: [hint for hint in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(hint)]
        for name in sections
    }
    paths = [
        f"{name}.{key}"
        for name in sections
        if any(key in {field.name for field in dataclasses.fields(kind)} for kind in kinds[name])
    ]
    return f"did you mean {' or '.join(map(repr, paths))}?" if paths else ""


def _choose(family: type[Variants], value: typing.Any, path: str) -> typing.Any:
    if isinstance(value, family):
        return configure(type(value), value, path)
    options = {"name": value} if isinstance(value, str) else value
    if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
        raise ValueError(
            f"{path} = {shown(value)} must be a name or a mapping with the key 'name', one of {', '.join(family.variants)}"
        )
    name = options["name"]
    if name not in family.variants:
        raise ValueError(f"{path}.name = {name!r} is not valid; {nearest(name, family.variants)}")
    return configure(family.variants[name], {key: item for key, item in options.items() if key != "name"}, path)


def _convert(hint: typing.Any, value: typing.Any, path: str) -> typing.Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is typing.Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [arg for arg in args if arg is not type(None)]
        origins = {get_origin(option) for option in options}
        if isinstance(value, Mapping) and dict not in origins:  # report the fault of one of its keys instead
            options = [option for option in options if dataclasses.is_dataclass(option)] or options
        for option in options[:-1]:
            try:
                return _convert(option, value, path)
            except ValueError:
                continue
        try:
            return _convert(options[-1], value, path)
        except ValueError as error:
            if type(None) in args and options[-1] in (int, float, bool, str):  # YAML 1.1 reads `off` as False
                raise ValueError(f"{error}, or null") from None
            raise
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{path} = {shown(value)} is not valid; choose one of {', '.join(map(repr, args))}")
        return value
    if isinstance(hint, type) and issubclass(hint, Variants):
        return _choose(hint, value, path)
    if dataclasses.is_dataclass(hint):
        return configure(hint, value, path)  # type: ignore[arg-type]
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{path} = {shown(value)} is not valid; a list is needed")
        kinds = [args[0]] * len(value) if origin is list or args[-1] is Ellipsis else args
        if len(kinds) != len(value):
            raise ValueError(f"{path} = {shown(value)} is not valid; {len(kinds)} values are needed")
        return origin(
            _convert(kind, item, f"{path}[{index}]")
            for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path} = {shown(value)} is not valid; a mapping is needed")
        return {key: _convert(args[1], item, f"{path}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of an integer
            return float(value)
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-3 as a string
            return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool) and not is_int64(value):
        raise ValueError(f"{path} = {brief(value)} is not valid; an integer of 64 bits is needed")
    if isinstance(value, hint) and hint is not float and not (hint is int and isinstance(value, bool)):
        return value
    quotes = (
        "; in YAML a text that reads like a value of another kind stands in quotes"
        if hint is str and isinstance(value, (int, float))
        else ""
    )
    raise ValueError(f"{path} = {shown(value)} is not valid; a value of type {hint.__name__} is needed{quotes}")


def at_least(config: object, **bounds: float) -> None:
    """Refuse fields that are below their bounds, infinite or NaN.

    >>> at_least(types.SimpleNamespace(steps=0), steps=1)
    Traceback (most recent call last):
    ValueError: steps = 0 must be at least 1
    """
    for name, bound in bounds.items():
        if not bound <= (value := getattr(config, name)) < math.inf:
            raise ValueError(f"{name} = {value} must be at least {bound}{' and finite' if value == math.inf else ''}")


def positive(config: object, *names: str, below: float | None = None, zero: bool = False) -> None:
    """Check that options are positive (with `zero`: not negative) and below a bound.

    None passes, and infinity without a bound. ValueError names the first that fails.
    """
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if not (value >= 0 if zero else value > 0) or (below is not None and not value < below):
            wanted = ("at least 0" if zero else "positive") + ("" if below is None else f" and below {below}")
            raise ValueError(f"{name} = {value} must be {wanted}")
