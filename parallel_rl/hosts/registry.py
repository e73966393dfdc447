"""Registry of frameworks: a line for each, under the name that `parallel-rl verify --through` takes."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple


class Framework(NamedTuple):
    """Modules of a framework below `parallel_rl.hosts`, imported on first use, as they load torch.

    law: has `through(loss_fn)`. port: has `SECTIONS`, `recognises(config)` and `convert(config)`; None if configs are not
    ported.
    """

    law: str
    port: str | None = None


FRAMEWORKS = {
    "nemo_rl": Framework("nemo_rl.loss", port="nemo_rl.port"),
    "verl": Framework("verl.loss", port="verl.port"),
    "slime": Framework("slime.law"),
    "trl": Framework("trl"),
    "transformers": Framework("transformers"),
    "skyrl": Framework("skyrl"),
    "torchtitan": Framework("torchtitan"),
}


def part(name: str) -> ModuleType:
    """Import a module of a framework.

    >>> part(FRAMEWORKS["verl"].law).__name__
    'parallel_rl.hosts.verl.loss'
    """
    return import_module(f"parallel_rl.hosts.{name}")
