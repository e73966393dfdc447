"""From a YAML file and dotted overrides to a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from parallel_rl.config import configure
from parallel_rl.training.config import TrainConfig


def load_config(path: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The run that a YAML file and dotted overrides describe.

    Args:
        path: the YAML file; relative paths under its `data` and its `run.init_from` start at its folder.
        overrides: "--a.b", "value" or "--a.b=value", the value in YAML; paths in them start at the working folder.

    Raises:
        ValueError: a missing or malformed file, an override without a value, or anything that `configure` refuses.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"the config file {file.absolute()} does not exist")
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{file} holds {type(tree).__name__}; a mapping of sections is needed")
    _resolve(tree, file.parent)
    for dotted, value in _pairs(overrides):
        _set(tree, dotted, value)
    return configure(TrainConfig, tree)


def as_mapping(config: TrainConfig) -> Mapping[str, object]:
    """The whole config as plain values, for the run's record."""
    return asdict(config)


def _resolve(tree: dict[str, object], folder: Path) -> None:
    data, run = tree.get("data"), tree.get("run")
    if isinstance(data, dict):
        data.update({key: str(folder / value) for key, value in data.items() if isinstance(value, str)})
    if isinstance(run, dict) and isinstance(run.get("init_from"), str):
        run["init_from"] = str(folder / str(run["init_from"]))


def _pairs(overrides: Sequence[str]) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    items = list(overrides)
    while items:
        name = items.pop(0)
        if not name.startswith("--") or len(name) == 2:
            raise ValueError(f"{name!r} is no override; write --section.key value")
        name, equals, text = name[2:].partition("=")
        if not equals:
            if not items or items[0].startswith("--"):
                raise ValueError(f"the override --{name} has no value; write --{name} value")
            text = items.pop(0)
        try:
            pairs.append((name, yaml.safe_load(text)))
        except yaml.YAMLError:
            raise ValueError(f"the value of --{name}, {text!r}, is no valid YAML") from None
    return pairs


def _set(tree: dict[str, object], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for depth, parent in enumerate(parents):
        below = tree.get(parent)
        if below is None:
            below = tree[parent] = {}
        if not isinstance(below, dict):
            raise ValueError(f"--{dotted}: {'.'.join(parents[: depth + 1])} = {below!r} is a value, not a section")
        tree = below
    tree[last] = value
