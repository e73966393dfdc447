"""The reference names everything: public names, commands, keys of a config and options of losses."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from argparse import SUPPRESS
from collections.abc import Iterator

from parallel_rl.cli import command_parsers
from parallel_rl.cli.keys import described, is_family, sections_of
from parallel_rl.losses.registry import get_loss
from parallel_rl.servers.http_reward import HTTPRewardConfig
from parallel_rl.training.config.sections import ServerConfig
from parallel_rl.training.config.train import TrainConfig
from tests.training.helpers import ROOT
from tools.reference import api, config, losses


def test_the_api_page_and_the_command_line_page_name_everything() -> None:
    """Each name of each package that lists its public names, and each command with each of its options."""
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "parallel_rl").rglob("__init__.py")
        if re.search("^__all__", path.read_text(encoding="utf-8"), re.M)
    }
    assert packages == {*api.MODULES}
    page = api.api_page()
    for package in packages:
        names = sys.modules[package].__all__
        assert [name for name in names if f"\n### {name}\n" not in page] == [], package
    page = api.command_line_page()
    for command, parser in command_parsers().items():
        options = {option for action in parser._actions if action.help != SUPPRESS for option in action.option_strings}
        section = page.split(f"\n## {command}\n")[1].split("\n## ")[0]
        assert [option for option in options if option not in section] == [], command


def undescribed(section: type, path: str, seen: set[type]) -> Iterator[str]:
    """List the keys of a config, of its sections and variants that no docstring describes."""
    if section in seen:
        return
    seen.add(section)
    classes = section.variants if is_family(section) else {"": section}
    for variant, cls in classes.items():
        texts = described(cls)
        for name, hint in typing.get_type_hints(cls).items():
            if name in {field.name for field in dataclasses.fields(cls)}:
                if not texts.get(name):
                    yield f"{path}{variant and f'({variant})'}.{name} ({cls.__name__})"
                for below in sections_of(hint):
                    yield from undescribed(below, f"{path}.{name}", seen)


def test_every_key_and_option_is_described() -> None:
    """Those of a run, which `train --help KEY` and docs/config.md show, and those of the losses, on their pages."""
    seen: set[type] = set()
    roots = {"run": TrainConfig, **{name: get_loss(name).config_class for name in losses.built_in()}}
    missing = [name for path, root in roots.items() for name in undescribed(root, path, seen)]
    assert missing == [], "describe them in the class's docstring: `name: ...`"
    for section, page in config.ELSEWHERE.items():
        if section in (ServerConfig, HTTPRewardConfig):
            shown = (ROOT / "docs" / page).read_text(encoding="utf-8")
            assert not {name for name in described(section) if f"`{name}`" not in shown}, page
