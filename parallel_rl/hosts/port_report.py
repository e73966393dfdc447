"""Report of a port: the fate of every key of another framework's config."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from parallel_rl.config.json_text import brief
from parallel_rl.config.strict import closest

KINDS = {
    "carried": "carried",
    "equal": "equal to ours",
    "no_effect": "without effect here",
    "yours": "yours to set",
    "unsupported": "not supported",
}
NEEDED = "a run needs it, and the config has nothing for it"
_WORDS = {"no_effect": "dropped", "unsupported": "left"}
_OFF = (None, False, "none", "disabled")


@dataclass(frozen=True)
class Fate:
    """Fate of a key: its kind (of `KINDS`), our dotted key if there is one, and the reason if needed.

    `off`: of an unsupported key or one of yours, the value (as text) that means what this trainer does anyway.
    """

    kind: str
    ours: str = ""
    why: str = ""
    off: str = ""


@dataclass(frozen=True)
class Row:
    """Fate of a key, or of a section of one fate; `key` is empty for a key that only we have."""

    key: str
    value: object
    kind: str
    ours: str
    why: str
    keys: int = 1

    def line(self) -> str:
        target = f" → {self.ours}" if self.ours else ""
        value = "" if self.keys > 1 or not self.key else f" = {brief(self.value)}"
        return f"{_WORDS.get(self.kind, self.kind):<9} {self.key}{value}{target}{': ' if self.why else ''}{self.why}"


@dataclass(frozen=True)
class Table:
    """Fates of unread keys by dotted prefix, the longest match first; "*.name" is a key of any section.

    `like`: sections with another section's keys, and why they cannot differ.
    """

    fates: Mapping[str, Fate]
    like: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @staticmethod
    def of(groups: tuple[tuple[str, str, str, str, str], ...], like: Mapping[str, tuple[str, str]]) -> Table:
        """Make a table from groups (section, kind, our key, why, names); "name=value" has our value.

        >>> Table.of((("a", "unsupported", "", "why", "b c=1"),), {}).fates["a.c"].off
        '1'
        """
        fates = {}
        for section, kind, ours, why, names in groups:
            for name in names.split():
                key, _, off = name.partition("=")
                fates[f"{section}.{key}" if section else key] = Fate(kind, ours, why, off)
        return Table(fates, like)

    def find(self, path: str) -> tuple[str, Fate] | None:
        parts = path.split(".")
        ends = range(len(parts), 0, -1)
        names = [(end, ".".join(parts[:end])) for end in ends] + [(end, f"*.{parts[end - 1]}") for end in ends]
        return next(((".".join(parts[:end]), self.fates[name]) for end, name in names if name in self.fates), None)


@dataclass
class Ledger:
    """Fates of read keys and reasons of disabled sections; both override the table."""

    read: dict[str, Fate] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)

    def rows(
        self, config: Mapping[str, object], ours: Mapping[str, object], table: Table, missing: Sequence[str] = ()
    ) -> tuple[Row, ...]:
        """Make a row per key, or per section of one fate; `missing` are our keys that a run lacks."""
        return tuple(_collapsed("", config, _Account(self, config, ours, table, missing)))

    def unknown(self, config: Mapping[str, object], table: Table) -> tuple[str, ...]:
        """List unknown keys, each with the nearest known one."""
        account = _Account(self, config, {}, table)
        keys = dict.fromkeys(account.unknown_at(path) for path, _ in _leaves("", config) if not account.knows(path))
        return tuple(f"{key} = {brief(_at(config, key))} ({account.near(key)})" for key in keys)


@dataclass(frozen=True)
class _Account:
    ledger: Ledger
    config: Mapping[str, object]
    ours: Mapping[str, object]
    table: Table
    missing: Sequence[str] = ()

    def knows(self, path: str) -> bool:
        if path in self.ledger.read or self.table.find(path) is not None or self._is_section(path):
            return True
        alias = self._alias(path)
        return alias is not None and self.knows(alias[0])

    def fate(self, path: str, value: object) -> Fate:
        if not self.knows(path):
            return Fate("unsupported", why=f"unknown; {self.near(self.unknown_at(path))}")
        off = next((why for section, why in self.ledger.off.items() if f"{path}.".startswith(f"{section}.")), None)
        if off is not None:
            return Fate("no_effect", why=off)
        fate = self.ledger.read.get(path)
        if fate is not None:
            if fate.kind == "carried" and fate.ours in self.missing:
                return Fate("yours", fate.ours, NEEDED)
            lost = fate.kind == "carried" and not holds(self.ours, fate.ours)
            return Fate("equal", fate.ours, "our default") if lost else fate
        row, alias = self.table.find(path), self._alias(path)
        if row is not None:
            return self._of_table(*row, value)
        if alias is not None:
            other_value = _at(self.config, alias[0])
            if other_value == value:
                return Fate("equal", why=f"as {alias[0]}")
            other_row = self.table.find(alias[0])
            if other_row is not None and other_row[1].kind in ("no_effect", "equal"):
                return other_row[1]
            return Fate("no_effect" if value in ({}, [], None) else "unsupported", why=alias[1])
        return Fate("no_effect", why="empty")

    def _of_table(self, prefix: str, fate: Fate, value: object) -> Fate:
        if fate.kind not in ("unsupported", "yours"):
            return fate
        section = _at(self.config, prefix)
        if isinstance(section, Mapping):
            switch = next((section[name] for name in ("enabled", "enable") if name in section), not _is_off(section))
        else:
            switch = not (_means(fate.off, section) if fate.off else _is_off(section))
        return fate if switch else Fate("equal", why="off, as here" if not fate.off else "what this trainer does")

    def _alias(self, path: str) -> tuple[str, str] | None:
        for section, (other, why) in self.table.like.items():
            if path.startswith(f"{section}."):
                return f"{other}{path[len(section) :]}", why
        return None

    def _is_section(self, path: str) -> bool:
        return any(key.startswith(f"{path}.") for key in (*self.ledger.read, *self.table.fates))

    def unknown_at(self, path: str) -> str:
        parts = path.split(".")
        prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((prefix for prefix in prefixes if not self.knows(prefix)), path)

    def near(self, path: str) -> str:
        """Name the most similar known key of the same section."""
        section, _, name = path.rpartition(".")
        alias = self._alias(path)
        above = f"{section}." if section else ""
        known = {
            key[len(above) :].split(".")[0]
            for key in (*self.ledger.read, *self.table.fates)
            if key.startswith(above) and not key.startswith("*")
        }
        close = closest(name, known)
        if close is None and alias is not None:
            return self.near(alias[0])
        return "no such key there" if close is None else f"did you mean {close!r}?"


_MISSING = object()


def _at(tree: Mapping[str, object], path: str) -> object:
    """Return the value at a dotted key, whose names may contain dots, or _MISSING."""
    if path in tree:
        return tree[path]
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        below = tree.get(".".join(parts[:end]))
        if isinstance(below, Mapping):
            return _at(below, ".".join(parts[end:]))
    return _MISSING


def holds(tree: Mapping[str, object], path: str) -> bool:
    """Return whether a config has a dotted key.

    >>> holds({"rl": {"prompts": 8}}, "rl.prompts"), holds({"rl": {}}, "rl.prompts")
    (True, False)
    """
    return _at(tree, path) is not _MISSING


def lacks(tree: Mapping[str, object], path: str) -> bool:
    return _at(tree, path) in (_MISSING, None)


def _is_off(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_off(item) for key, item in value.items() if key != "_target_")
    return value in _OFF or value in ({}, [], "", 0)


def _means(off: str, value: object) -> bool:
    """Return whether a table's value means what this trainer does; false and 0 are values like any other.

    >>> _means("True", False), _means("1.0", 1), _means("constant", None)
    (False, True, True)
    """
    if value is None or value in ("none", "disabled") or str(value) == off:
        return True
    try:
        return not isinstance(value, bool) and float(str(value)) == float(off)
    except ValueError:
        return False


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)
    else:
        yield path, value


def _collapsed(path: str, value: object, account: _Account) -> list[Row]:
    if not isinstance(value, Mapping) or not value:
        fate = account.fate(path, value)
        return [Row(path, value, fate.kind, fate.ours, fate.why)]
    rows = [
        row for key, item in value.items() for row in _collapsed(f"{path}.{key}" if path else str(key), item, account)
    ]
    fates = {(row.kind, row.ours, row.why) for row in rows}
    if not path or len(rows) == 1 or len(fates) > 1 or rows[0].kind == "carried":
        return rows
    return [Row(path, value, *fates.pop(), sum(row.keys for row in rows))]


def summary(rows: tuple[Row, ...]) -> str:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.kind] += row.keys if row.key else 0
    return f"{sum(counts.values())} keys: " + ", ".join(f"{counts[kind]} {text}" for kind, text in KINDS.items())


def write(rows: tuple[Row, ...], file: Path) -> None:
    """Write the rows as JSON lines: key, value, kind, ours, why; ValueError if the file cannot be written."""
    names = ("key", "value", "kind", "ours", "why")
    lines = [json.dumps({name: asdict(row)[name] for name in names}, default=str, ensure_ascii=False) for row in rows]
    try:
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--report {file} cannot be written: {error}") from None
