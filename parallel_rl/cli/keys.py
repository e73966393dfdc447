"""The keys of a run's config on the command line: what each means, and where its value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from parallel_rl.cli.runs import importing, refuse, show, source


def help_of(key: str) -> int:
    """Print type, default and description of a key or a section; returns the exit status."""
    with importing():
        from parallel_rl.config.described import describe
        from parallel_rl.training.config.train import TrainConfig

    try:
        show(describe(TrainConfig, key.removeprefix("--")))
    except ValueError as error:
        return refuse(error)
    return 0


def print_config(recipe: str | None, rest: Sequence[str]) -> int:
    """Print the whole config of a run as YAML, each value with its source; returns the exit status."""
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
