"""The page of a run's config keys, from the dataclasses of `parallel_rl/training/config`."""

from __future__ import annotations

import typing

from parallel_rl.advantages import AdvantageEstimator
from parallel_rl.cli.keys import about, is_family, sections_of
from parallel_rl.losses.choice import LossConfig
from parallel_rl.servers.http_reward import HTTPRewardConfig
from parallel_rl.training.config.sections import ServerConfig
from parallel_rl.training.config.train import TrainConfig
from tools.reference.markdown import options_table, page, variants

# options that have a page of their own
ELSEWHERE = {
    LossConfig: "reference/losses/index.md",
    AdvantageEstimator: "reference/advantages.md",
    ServerConfig: "rollout_server.md",
    HTTPRewardConfig: "rewards.md",
}
INTRODUCTION = """# The keys of a run's config

Made by `make docs` from the dataclasses of `parallel_rl/training/config`; a test checks it.

A config is a YAML file with the sections below. It needs `run`, `tokenizer`, `data` and exactly one of `rl`, `preference`,
`sft` and `distillation`. With `extends: FILE`, the keys of this file replace those of FILE. Relative paths start at the
folder of the file that holds them. [Rewards](rewards.md) describes `reward`. In the tables, `null` is YAML's word for None.
`sft` has the keys of `warmup`. The word *section* links to the section's keys.

- Set a key on the command line: `--rl.optimizer.lr 1e-4`. Remove a section: `--evaluation null`.
- Describe a key or a section: `parallel-rl train --help rl.server`.
- Print every key with its value and its source (command line, file or default): `parallel-rl train CONFIG --print-config`.
- Check the config for N ranks: `parallel-rl check CONFIG --world N`.
"""


def config_page() -> str:
    """Write the sections of a config, each class once, in order of first mention."""
    paths = _paths()
    parts = [INTRODUCTION]
    for cls, path in paths.items():
        if cls is TrainConfig:
            continue
        level = "#" * (path.count(".") + 2)
        parts.append(f"{level} `{path}`")
        if is_family(cls):
            parts.append(variants(cls, f"{level}#"))
        else:
            parts += [about(cls), options_table(cls, sections=_links(cls, paths))]
    return page(*parts)


def _paths() -> dict[type, str]:
    """Map each class of a section to the first key that holds it."""
    paths: dict[type, str] = {}

    def visit(cls: type, path: str) -> None:
        if cls in paths or cls in ELSEWHERE:
            return
        paths[cls] = path
        if is_family(cls):
            return
        for name, hint in typing.get_type_hints(cls).items():
            for below in sections_of(hint):
                visit(below, f"{path}.{name}".removeprefix("."))

    visit(TrainConfig, "")
    return paths


def _links(cls: type, paths: dict[type, str]) -> dict[str, str]:
    """Link the fields that hold a section to its heading or its page."""
    held = {name: sections_of(hint) for name, hint in typing.get_type_hints(cls).items()}
    return {
        name: ELSEWHERE.get(below[0]) or f"#{paths[below[0]].replace('.', '')}" for name, below in held.items() if below
    }
