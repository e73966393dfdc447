"""config.yaml of a run's folder, and the numbered configs of earlier starts that differ."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from parallel_rl.config.yaml_files import parsed
from parallel_rl.training.reporting.run_log import write_whole

_NAME = re.compile(r"config\.([1-9]\d{0,8})\.yaml")
_HEAD = "# of the starts before "  # distinguishes a kept one from a user's file
_SHOWN = 40  # differences
_ABSENT = object()


def write_config(folder: Path, config: Mapping[str, object], *, starts_over: bool = False) -> list[str]:
    """Write config.yaml; keep a different older one as config.<number>.yaml, and list the changes.

    An OSError leaves config.yaml as it was.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_config(folder, {"rl": {"optimizer": {"lr": 0.1}}})
    []
    >>> write_config(folder, {"rl": {"optimizer": {"lr": 0.2}}})
    ['the config has changed; the old one is kept as config.1.yaml', '  rl.optimizer.lr: 0.1 -> 0.2']
    """
    path, text = folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False)
    lines: list[str] = []
    if path.is_file() and not starts_over:
        before = path.read_text(encoding="utf-8", errors="replace")
        if lines := _differences(before, text):
            kept = _keep(folder, before)
            lines = [f"the config has changed; the old one is kept as {kept.name}", *lines]
    write_whole(path, text)
    return lines


def remove_configs(folder: Path) -> None:
    """Remove the configs that `write_config` kept."""
    for path in _kept(folder):
        path.unlink()


def _differences(before: str, after: str) -> list[str]:
    try:
        old = parsed(before)
    except ValueError as error:
        return [f"  it is not valid YAML: {str(error).splitlines()[0]}"]
    lines = [f"  {key}: {_text(a)} -> {_text(b)}" for key, a, b in _changes("", old, parsed(after))]
    return [*lines[:_SHOWN], *([f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]


def _changes(key: str, old: object, new: object) -> Iterator[tuple[str, object, object]]:
    """List (dotted key, old value, new value) of changes, in the new config's order."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*new, *old]):
            below = f"{key}.{name}" if key else str(name)
            yield from _changes(below, old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif type(old) is not type(new) or old != new:
        yield key or "all of it", old, new


def _text(value: object) -> str:
    if value is _ABSENT:
        return "(absent)"
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 20)
    return text.removesuffix("...\n").strip()


def _keep(folder: Path, text: str) -> Path:
    numbers = [int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    path = folder / f"config.{max(numbers, default=0) + 1}.yaml"
    write_whole(path, f"{_HEAD}{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}")
    return path


def _kept(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("config.*.yaml") if _NAME.fullmatch(path.name) and path.is_file()]
    return [path for path in paths if path.read_bytes().startswith(_HEAD.encode())]
