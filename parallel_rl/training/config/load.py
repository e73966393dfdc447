"""Load a run's config from a YAML file and dotted overrides."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch.distributed as dist

from parallel_rl.agreement import on_first_rank, raise_on_all_ranks
from parallel_rl.config.strict import Variants, configure
from parallel_rl.config.yaml_files import override, read_tree
from parallel_rl.training.config.train import TrainConfig

_READ_BY = (("evaluation", "held_out"), ("warmup", "examples"))  # sections, and the files of `data` that only they read


def load_config(
    path: str, overrides: Sequence[str] = (), say: Callable[[str], object] = lambda line: None
) -> TrainConfig:
    """Read a YAML file and dotted overrides into the config of a run.

    Args:
        path: the YAML file, see `read_tree`; relative paths in it start at its folder.
        overrides: "--a.b", "value" or "--a.b=value", values in YAML; paths in them start at the working folder.
        say: gets a line for each setting of the file that an override disables.

    ValueError for a missing or malformed file, an override without a value, or a config that `configure` refuses.
    """
    tree = read_tree(Path(path))
    needs = tree.pop("needs", None)
    if needs is not None:
        raise ValueError(
            f"{Path(path).name} is a loss without a run: it needs {needs}, which this trainer does not have; "
            "parallel_rl.recipes.load_recipe gives the loss and its config"
        )
    before = {section: (tree.get(section) is not None, _section(tree, "data").get(name)) for section, name in _READ_BY}
    override(tree, overrides)
    for section, name in _READ_BY:
        was_there, files = before[section]
        ended = was_there and tree.get(section) is None and not (name == "examples" and _reads_examples(tree))
        if ended and files is not None and _section(tree, "data").get(name) == files:
            override(tree, [f"--data.{name}=null"])
            say(f"data.{name} = {files!r} of {Path(path).name} is not read: {section} = None")
    return configure(TrainConfig, tree)


def _reads_examples(tree: Mapping[str, object]) -> bool:
    distills = tree.get("distillation") is not None and _section(tree, "distillation").get("rows") != "policy"
    return tree.get("sft") is not None or distills or bool(_section(tree, "rl").get("experts"))


def _section(tree: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def as_mapping(config: TrainConfig) -> Mapping[str, object]:
    """Convert the config to plain values for the run's record; `configure` reads them back."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def check_same_config(config: TrainConfig) -> None:
    """Compare the config and the tokenizer's file over all ranks; ValueError on all if they differ."""

    def flat_config() -> dict[str, str]:
        return {
            **dict(_flat("", as_mapping(config))),
            **{name: repr(x) for name, x in config.tokenizer.identity.items()},
        }

    if dist.get_world_size() == 1:
        return
    first = on_first_rank(flat_config, "the config")

    def compare() -> None:
        mine = flat_config()
        for key in dict.fromkeys([*first, *mine]):
            if first.get(key) != mine.get(key):
                here, there = mine.get(key, "not there"), first.get(key, "not there")
                raise ValueError(
                    f"{key} is {here} on {socket.gethostname()} and {there} on rank 0; all ranks need one config"
                )

    raise_on_all_ranks(compare)


def _flat(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(f"{key}.{name}" if key else str(name), item)
    else:
        yield key, repr(value)


def _plain(value: object) -> object:
    if is_dataclass(value):
        name: dict[str, object] = {"name": value.name} if isinstance(value, Variants) else {}
        return name | {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
