"""Typed look-ups in config.json, and one rule for keys that have two spellings or two places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def agreed(where: str, values: Mapping[str, T | None]) -> T | None:
    """Return the value of a key that may stand under several names; null counts as absent.

    >>> agreed("config.json", {"num_experts": None, "num_local_experts": 8})
    8

    Raises:
        ValueError: the values differ. transformers takes one of them, and not in each version the same one.
    """
    present = {name: value for name, value in values.items() if value is not None}
    for (first, value), (second, other) in zip(present.items(), list(present.items())[1:], strict=False):
        if value != other:
            raise ValueError(
                f"{where}: {first} = {value!r} and {second} = {other!r} differ; keep the one that is right"
            )
    return next(iter(present.values()), None)


class Keys:
    """Typed look-ups whose errors name the file and the key; `asked` holds the keys looked up so far."""

    def __init__(self, tree: Mapping[str, object], where: str) -> None:
        self.tree, self.where = tree, where
        self.asked: set[str] = set()

    def _get(self, name: str) -> object:
        self.asked.add(name)
        return self.tree.get(name)

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the integer under the first of `names` that is there and not null."""
        for name, value in [(name, self._get(name)) for name in names]:
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ValueError(f"{self.where}: {name} = {value!r} must be an integer")
                return value
        if default is None:
            raise ValueError(f"{self.where} lacks {names[0]}")
        return default

    def number(self, name: str, default: float | None = None) -> float:
        """Return the number under `name`."""
        value = self._get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise ValueError(f"{self.where} lacks {name}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.where}: {name} = {value!r} must be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return the boolean under `name`."""
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} = {value!r} must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Return the text under `name`."""
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {name} = {value!r} must be a text")
        return value

    def mapping(self, name: str) -> Mapping[str, object]:
        """Return the mapping under `name`, empty where it is not there."""
        value = self._get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {name} = {value!r} must be a mapping")
        return value or {}
