"""The page of a run's config keys, from the dataclasses of `parallel_rl/training/config`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

from parallel_rl.advantages import AdvantageEstimator
from parallel_rl.config.described import marks_of
from parallel_rl.experience import Overlong
from parallel_rl.losses.choice import LossConfig
from parallel_rl.training.config.server import ServerConfig
from parallel_rl.training.config.train import TrainConfig
from tools.reference.markdown import options_table, page, variants

# options that have a page of their own
ELSEWHERE = {
    LossConfig: "`{name: ..., options: {...}}`, see [Losses](reference/losses/index.md)",
    AdvantageEstimator: "`{name: ..., ...}`, see [Advantages](reference/advantages.md)",
    ServerConfig: "See [Sample from a rollout server](rollout_server.md)",
}
INTRODUCTION = """# The keys of a run's config

Made by `make docs` from the dataclasses of `parallel_rl/training/config`; a test checks it.

A config is a YAML file with the sections below. It needs `run`, `tokenizer`, `data` and exactly one of `rl`, `preference`,
`sft` and `distillation`. With `extends: FILE`, the keys of this file replace those of FILE. Relative paths start at the
folder of the file that holds them. [Rewards](rewards.md) describes `reward`. In the tables, `null` is YAML's word for None.

- Set a key on the command line: `--rl.optimizer.lr 1e-4`. Remove a section: `--evaluation null`.
- Describe a key or a section: `parallel-rl train --help rl.server`.
- Print every key with its value and its source (command line, file or default): `parallel-rl train CONFIG --print-config`.
- Check the config for N ranks: `parallel-rl check CONFIG --world N`.
"""


def config_page() -> str:
    """Write a section for each section of a config."""
    seen: dict[type, str] = {}
    sections = [
        part
        for name, hint in typing.get_type_hints(TrainConfig).items()
        if name != "reward"
        for cls in _dataclasses(hint)
        for part in _section(name, cls, seen)
    ]
    return page(INTRODUCTION, *sections)


def _section(path: str, cls: type, seen: dict[type, str]) -> Iterator[str]:
    yield f"{'###' if '.' in path else '##'} `{path}`"
    if cls in seen or cls in ELSEWHERE:
        yield f"As `{seen[cls]}`." if cls in seen else ELSEWHERE[cls]
        return
    seen[cls] = path
    if cls is Overlong:
        yield variants(Overlong, "####")
        return
    text, marks = marks_of(cls)
    about = text[: marks[0].start()] if marks else text
    yield about.replace("Attributes:", "").strip()
    yield options_table(cls)
    for name, hint in typing.get_type_hints(cls).items():
        for below in _dataclasses(hint):
            yield from _section(f"{path}.{name}", below, seen)


def _dataclasses(hint: object) -> list[type]:
    kinds = (hint, *typing.get_args(hint))
    return [one for one in kinds if isinstance(one, type) and (dataclasses.is_dataclass(one) or one is Overlong)]
