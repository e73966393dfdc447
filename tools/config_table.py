"""Writes docs/config.md, the keys of a run's config, from its dataclasses: python -m tools.config_table"""

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
from tools.losses_table import ROOT, _options, _variants

FILE = ROOT / "docs" / "config.md"
# options that have a page of their own
ELSEWHERE = {
    LossConfig: "`{name: ..., options: {...}}`, see [losses.md](losses.md#losses)",
    AdvantageEstimator: "`{name: ..., ...}`, see [losses.md](losses.md#advantages)",
    ServerConfig: "See [rollout_server.md](rollout_server.md)",
}
INTRODUCTION = """# The keys of a run's config

Made by `make docs` from the dataclasses of `parallel_rl/training/config`; a test checks it.

A config is a YAML file of the sections below. `run`, `tokenizer`, `data` and exactly one of `rl`, `preference`, `sft` and
`distillation` are needed. `extends: FILE` puts a file on top of another one, key by key; relative paths start at the file's
folder. On the command line `--rl.optimizer.lr 1e-4` sets any key, `--evaluation null` removes a section, and
`parallel-rl check CONFIG --world N` checks them all. `parallel-rl train --help rl.server` describes a key or a section;
`parallel-rl train CONFIG --print-config` prints every key of a run with its value and whether the command line, a file or the
default sets it. `reward` is described in [rewards.md](rewards.md). In the tables `null` is
YAML's word for None.
"""


def document() -> str:
    """The whole file."""
    seen: dict[type, str] = {}
    sections = [
        part
        for name, hint in typing.get_type_hints(TrainConfig).items()
        if name != "reward"
        for cls in _dataclasses(hint)
        for part in _section(name, cls, seen)
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in [INTRODUCTION, *sections])


def _section(path: str, cls: type, seen: dict[type, str]) -> Iterator[str]:
    yield f"{'###' if '.' in path else '##'} `{path}`\n"
    if cls in seen or cls in ELSEWHERE:
        yield f"As `{seen[cls]}`.\n" if cls in seen else f"{ELSEWHERE[cls]}\n"
        return
    seen[cls] = path
    if cls is Overlong:
        yield _variants(Overlong)
        return
    text, marks = marks_of(cls)
    about = text[: marks[0].start()] if marks else text
    yield f"{about.replace('Attributes:', '').strip()}\n"
    yield _options(cls)
    for name, hint in typing.get_type_hints(cls).items():
        for below in _dataclasses(hint):
            yield from _section(f"{path}.{name}", below, seen)


def _dataclasses(hint: object) -> list[type]:
    kinds = (hint, *typing.get_args(hint))
    return [one for one in kinds if isinstance(one, type) and (dataclasses.is_dataclass(one) or one is Overlong)]


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
