"""A run's config from a YAML file and dotted overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from parallel_rl.config.strict import Variants, configure
from parallel_rl.config.yaml_files import override, read_tree
from parallel_rl.training.config.train import TrainConfig


def load_config(
    path: str, overrides: Sequence[str] = (), say: Callable[[str], object] = lambda line: None
) -> TrainConfig:
    """The run that a YAML file and dotted overrides describe.

    Args:
        path: the YAML file, see `read_tree`; relative paths in it start at its folder.
        overrides: "--a.b", "value" or "--a.b=value", the value in YAML; paths in them start at the working folder.
        say: takes a line for what the file sets and an override leaves without use.

    Raises:
        ValueError: a missing or malformed file, an override without a value, a loss that the trainer cannot feed, or anything
            else that `configure` refuses.
    """
    tree = read_tree(Path(path))
    needs = tree.pop("needs", None)
    if needs is not None:
        raise ValueError(
            f"{Path(path).name} is a loss without a run: it needs {needs}, which this trainer does not have; "
            "parallel_rl.recipes.load_recipe gives the loss and its config"
        )
    evaluated, held_out = tree.get("evaluation") is not None, _held_out(tree)
    override(tree, overrides)
    if evaluated and tree.get("evaluation") is None and held_out is not None and _held_out(tree) == held_out:
        override(tree, ["--data.held_out=null"])
        say(f"data.held_out = {held_out!r} of {Path(path).name} is not read: evaluation = None")
    return configure(TrainConfig, tree)


def _held_out(tree: Mapping[str, object]) -> object:
    data = tree.get("data")
    return data.get("held_out") if isinstance(data, Mapping) else None


def as_mapping(config: TrainConfig) -> Mapping[str, object]:
    """The whole config as plain values, for the run's record; `configure` reads it again."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: object) -> object:
    if is_dataclass(value):
        name: dict[str, object] = {"name": value.name} if isinstance(value, Variants) else {}
        return name | {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return list(value) if isinstance(value, tuple) else value
