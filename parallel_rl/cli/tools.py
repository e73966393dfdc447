"""Commands that look before a run: plan, verify and doctor."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_rl.cli.runs import quiet, refuse, show

if TYPE_CHECKING:
    from parallel_rl.doctor.command import OfConfig
    from parallel_rl.plan.source import Source
    from parallel_rl.testing.cases import Subject


def plan(known: argparse.Namespace, rest: Sequence[str]) -> int:
    from parallel_rl.plan.command import run

    try:
        if rest:
            raise ValueError(f"{rest[0]!r} is not an argument of `parallel-rl plan`")
        return run(known, _read_source, show)
    except (ValueError, OSError) as error:
        return refuse(error)


def port(known: argparse.Namespace, rest: Sequence[str]) -> int:
    from parallel_rl.port.command import run

    try:
        if rest:
            raise ValueError(f"{rest[0]!r} is not an argument of `parallel-rl port`")
        return run(known)
    except (ValueError, OSError) as error:
        return refuse(error)


def _read_source(path: str, given: Mapping[str, object]) -> Source:
    """Read a model's file, or a run's config with the flags that are `given` in place of its keys."""
    from parallel_rl.config.yaml_files import read_tree
    from parallel_rl.plan.source import read_source

    if not path.endswith((".yaml", ".yml")) or "model" not in read_tree(Path(path)):
        return read_source(path)
    from parallel_rl.training.preflight.planned import planned

    return planned(path, given)


def verify(known: argparse.Namespace, rest: Sequence[str]) -> int:
    from parallel_rl.verify.command import run

    try:
        if rest:
            raise ValueError(f"{rest[0]!r} is not an argument of `parallel-rl verify`")
        return run(known, _loss_of_config)
    except (ValueError, OSError) as error:
        return refuse(error)


def _loss_of_config(path: str) -> Subject:
    from parallel_rl.training.config.load import load_config

    quiet()
    from parallel_rl.training.preflight.own_losses import own_loss

    return own_loss(load_config(path, []))


def doctor(known: argparse.Namespace, rest: Sequence[str]) -> int:
    from parallel_rl.doctor.command import run

    try:
        if rest:
            raise ValueError(f"{rest[0]!r} is not an argument of `parallel-rl doctor`")
        return run(known, _choices)
    except (ValueError, OSError) as error:
        return refuse(error)


def _choices(path: str) -> OfConfig:
    from parallel_rl.doctor.command import OfConfig
    from parallel_rl.doctor.findings import Finding
    from parallel_rl.training.config.load import as_mapping, load_config
    from parallel_rl.training.preflight.choices import choices

    config = load_config(path)
    findings = [
        Finding(choice.part, "warning" if choice.advice else "ok", choice.text, choice.advice)
        for choice in choices(config)
    ]
    parallel = config.parallel
    sizes = (parallel.tensor, parallel.context, parallel.pipeline)
    return OfConfig(findings, sizes, sorted(set(_urls(as_mapping(config)))))


def _urls(value: object) -> Iterator[str]:
    """The addresses of servers, wherever they stand."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _urls(item)
    elif isinstance(value, list):
        for item in value:
            yield from _urls(item)
    elif isinstance(value, str) and value.startswith(("http://", "https://")):
        yield value
