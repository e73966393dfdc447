"""`parallel-rl verify --model`: check one optimizer step of a user's Megatron model."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_rl.config.strict import nearest
from parallel_rl.testing.whole_step.layouts import StepLayout, check_layout, default_layouts

if TYPE_CHECKING:
    from parallel_rl.testing.whole_step.check import WholeStepReport
    from parallel_rl.testing.whole_step.subject import StepSubject

_SIZES = ("tp", "cp", "pp", "dp", "vp", "ep", "etp", "micro")
_SWITCHES = ("sp", "per_token", "recompute")
_SHOWN = "whole_step/shown"
_BOOLEANS = {"true": True, "false": False}
_PACKINGS = {"padded": False, "packed": True}


def step_layouts(words: Sequence[str]) -> list[StepLayout]:
    """Parse `tp=1,2 sp=true` into the product of layouts.

    >>> [layout.name for layout in step_layouts(["tp=2", "packing=padded,packed"])]
    ['tp2.padded.mb4', 'tp2.packed.mb4']

    Raises:
        ValueError: an unknown axis or value, or sizes that do not divide each other.
    """
    axes: dict[str, list[int]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        known = (*_SIZES, *_SWITCHES, "packing")
        if name not in known or not equals or name in axes:
            why = "is given twice" if name in axes else f"is not AXIS=VALUE,VALUE; {nearest(name, known)}"
            raise ValueError(f"--layouts {word} {why}")
        axes[name] = [_value(name, value) for value in values.split(",")]
    if "packing" in axes:
        axes["packed"] = axes.pop("packing")
    names, defaults = StepLayout._fields, StepLayout()
    every = [axes.get(name, [getattr(defaults, name)]) for name in names]
    combined = [StepLayout(*sizes) for sizes in itertools.product(*every)]
    for layout in combined:
        check_layout(layout)
    return combined


def _value(name: str, text: str) -> int:
    words = _BOOLEANS if name in _SWITCHES else _PACKINGS
    if name in _SIZES:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"--layouts {name}={text} is not valid; a positive number is needed")
        return int(text)
    if text not in words:
        raise ValueError(f"--layouts {name}={text} is not valid; {nearest(text, words)}")
    return words[text]


def run_model(arguments: argparse.Namespace) -> int:
    """Check the model of `--model`; return 0 if every layout that ran gives one process's step.

    Raises:
        ValueError: an option without effect on a model, an object that cannot be imported; see `check_step`.
    """
    for name in ("loss", "options", "config", "fields", "html"):
        if getattr(arguments, name):
            raise ValueError(f"--{name} has no effect with --model, whose step trains it; leave it out")
    if arguments.through != "megatron":
        raise ValueError("--model needs --through megatron, whose schedule runs it")
    layouts = None if arguments.layouts is None else step_layouts(arguments.layouts)
    sys.path.insert(0, os.getcwd())  # the user's modules, also for the ranks
    try:
        import parallel_rl.megatron  # noqa: F401  before megatron itself: it silences warnings about a missing GPU
    except ModuleNotFoundError as error:
        raise ValueError(f"--through megatron: {error}; pip install 'megatron-core>=0.15,<0.20' psutil") from None
    subject = _subject(arguments)
    quiet = arguments.json == "-"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _in_job(subject, layouts, arguments.timeout, arguments.json)
    report = _on_this_machine(subject, layouts, arguments.timeout, quiet)
    _show(report, arguments.json)
    return 0 if report.ok else 1


def _show(report: WholeStepReport, json_file: str | None) -> None:
    """Print the report, or its JSON if the file is "-"; write the JSON to any other file."""
    text = json.dumps({"ok": report.ok, "models": [report.as_json()]}, indent=1)
    print(text if json_file == "-" else report, flush=True)
    if json_file and json_file != "-":
        Path(json_file).write_text(text + "\n", encoding="utf-8")


def _subject(arguments: argparse.Namespace) -> StepSubject:
    from parallel_rl.testing.whole_step.subject import StepSubject

    provider = _imported("--model", arguments.model)
    config = None if arguments.model_config is None else _imported("--model-config", arguments.model_config)
    if config is None and not hasattr(provider, "provide"):
        module, _, _ = arguments.model.rpartition(":")
        config = getattr(sys.modules[module], "config", None)
        if config is None:
            raise ValueError(
                f"--model {arguments.model}: {module} has no `config`; name it by --model-config MODULE:OBJECT"
            )
    hooks = {}
    for name in ("forward_step", "loss_callback", "setup"):
        text = getattr(arguments, name)
        hooks[name] = None if text is None else _imported(f"--{name.replace('_', '-')}", text)
    return StepSubject(provider, config, **hooks)  # type: ignore[arg-type]


def _imported(option: str, text: str) -> object:
    module, colon, name = text.rpartition(":")
    if not colon:
        raise ValueError(f"{option} {text} is not MODULE:OBJECT")
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # of the user's module
        raise ValueError(f"{option} {text}: {module} cannot be imported: {type(error).__name__}: {error}") from None
    if not hasattr(imported, name):
        public = [key for key in vars(imported) if not key.startswith("_")]
        raise ValueError(f"{option} {text}: {module} has no {name!r}; {nearest(name, public)}")
    value: object = getattr(imported, name)
    return value


def _on_this_machine(
    subject: StepSubject, layouts: Sequence[StepLayout] | None, timeout: float, quiet: bool
) -> WholeStepReport:
    from parallel_rl.testing.pool import MAX_WORLD, close
    from parallel_rl.testing.whole_step.check import check_subject
    from parallel_rl.testing.whole_step.ranks import PoolRanks

    most = max((layout.world for layout in layouts or ()), default=1)
    if most > MAX_WORLD:
        raise ValueError(
            f"a layout of {most} ranks: this machine starts {MAX_WORLD} at most; run it under torchrun or srun"
        )

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    close()  # ranks of an earlier call lack the user's modules in their path
    try:
        return check_subject(subject, PoolRanks(timeout), layouts, show if not quiet and sys.stderr.isatty() else None)
    finally:
        close()


def _in_job(subject: StepSubject, layouts: Sequence[StepLayout] | None, timeout: float, json_file: str | None) -> int:
    import torch.distributed as dist

    from parallel_rl.groups import job_backend, take_device
    from parallel_rl.megatron import destroy
    from parallel_rl.testing.whole_step.check import check_subject
    from parallel_rl.testing.whole_step.ranks import JobRanks

    world = int(os.environ["WORLD_SIZE"])
    mine = [layout for layout in layouts or default_layouts(experts=True) if layout.world == world]
    if not mine:
        listed = "none of the layouts has so many" if layouts else "no default layout has so many; give --layouts"
        raise ValueError(f"the job has {world} ranks: {listed}")
    backend = job_backend()
    take_device()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
        report = check_subject(subject, JobRanks(timeout, store), mine)
        if dist.get_rank() == 0:
            _show(report, json_file)
            store.set(_SHOWN, "")
        store.wait([_SHOWN], timedelta(seconds=3 * timeout))  # a launcher ends all ranks once one has ended with a 1
        return 0 if report.ok else 1
    finally:
        destroy()
        dist.destroy_process_group()
