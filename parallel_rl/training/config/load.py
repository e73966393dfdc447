"""A run's config from a YAML file and dotted overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from parallel_rl.config.strict import Variants, configure
from parallel_rl.config.yaml_files import override, read_tree
from parallel_rl.training.config.train import TrainConfig


def load_config(path: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The run that a YAML file and dotted overrides describe.

    Args:
        path: the YAML file, see `read_tree`; relative paths in it start at its folder.
        overrides: "--a.b", "value" or "--a.b=value", the value in YAML; paths in them start at the working folder.

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
    override(tree, overrides)
    return configure(TrainConfig, tree)


def as_mapping(config: TrainConfig) -> Mapping[str, object]:
    """The whole config as plain values, for the run's record; `configure` reads it again."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: object) -> object:
    if is_dataclass(value):
        name: dict[str, object] = {"name": value.name} if isinstance(value, Variants) else {}
        return name | {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return list(value) if isinstance(value, tuple) else value
