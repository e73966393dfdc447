"""The console script: `parallel-rl train (CONFIG | --recipe NAME) [--section.key value ...]`, `... data`, `... recipes`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from parallel_rl import __version__
from parallel_rl.cli import explain, export, runs, sample, submit, tools
from parallel_rl.cluster import preemption
from parallel_rl.config.names import ENVIRONMENT, modules_of_user
from parallel_rl.doctor import command as doctor_command
from parallel_rl.plan import command as plan_command
from parallel_rl.port import command as port_command
from parallel_rl.verify import command as verify_command

_NEVER_IMPORT = ("check", "submit")  # they run on a host that is not the job's, for a config that nobody has read yet
_ABOUT = "Losses for RL post-training, and a reference trainer on Megatron-core."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 for a config, data or world that does not fit."""
    parser = argparse.ArgumentParser("parallel-rl", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"parallel-rl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train by a YAML config or a recipe, alone or under torchrun",
        usage="parallel-rl train (CONFIG | --recipe NAME) [--section.key value ...]",
        description="Trains by CONFIG, a YAML file (see configs/), or by a recipe. Any key can be overridden: "
        "--run.seed 1 --parallel.tensor 2 --rl.optimizer.lr 1e-4",
        allow_abbrev=False,
    )
    train.add_argument("--recipe", metavar="NAME", help="one of `parallel-rl recipes`, on the data that ships")
    train.add_argument(
        "--gate",
        metavar="SECONDS",
        type=float,
        nargs="?",
        const=300.0,
        help="first, in so many seconds from the last rank up (300): groups formed, and the run's own loss as in one process",
    )
    train.add_argument(
        "--dump-step",
        metavar="N",
        type=int,
        help="write the main phase's N-th optimizer step for `parallel-rl explain`",
    )
    check = commands.add_parser(
        "check",
        help="check a run's config, files and layout in seconds, before it holds any GPU",
        usage="parallel-rl check (CONFIG | --recipe NAME) --world N [--section.key value ...]",
        allow_abbrev=False,
    )
    check.add_argument("--recipe", metavar="NAME", help="one of `parallel-rl recipes`, on the data that ships")
    check.add_argument("--world", metavar="N", type=int, required=True, help="ranks: nodes × GPUs a node")
    check.add_argument("--dump-step", metavar="N", type=int, help="as `parallel-rl train` has it")
    submit.add_parser(commands)
    data = commands.add_parser(
        "data",
        help="check the data of a run and read what its steps read, without a model",
        usage="parallel-rl data (CONFIG | --recipe NAME) [--steps N] [--section.key value ...]",
        description="Says what is wrong with the data of a run, how fast it is read, how full micro-batches are, in how much "
        "memory. Takes the config and the overrides of `parallel-rl train`.",
        allow_abbrev=False,
    )
    data.add_argument("--recipe", metavar="NAME", help="one of `parallel-rl recipes`, on the data that ships")
    data.add_argument("--steps", metavar="N", type=int, help="steps of each phase, in place of the config's")
    export.add_parser(commands)
    sample.add_parser(commands)
    plan_command.add_parser(commands)
    port_command.add_parser(commands)
    verify_command.add_parser(commands)
    doctor_command.add_parser(commands)
    explain.add_parser(commands)
    for name, command in commands.choices.items():
        whose = "the ranks" if name in _NEVER_IMPORT else "first"
        if name != "explain":
            command.add_argument(
                "--import",
                dest="modules",
                metavar="MODULE",
                action="append",
                default=[],
                help=f"{whose} import this module of yours, which registers losses, rewards or loggers (may be given again; "
                f"{ENVIRONMENT} names others, by commas)",
            )
    commands.add_parser("recipes", help="list the recipes")
    known, rest = parser.parse_known_args(submit.joined(sys.argv[1:] if arguments is None else arguments))
    try:
        if hasattr(known, "modules") and getattr(known, "script", None) is None:  # a loop imports what it needs
            known.modules = modules_of_user(known.modules)
            if known.command not in _NEVER_IMPORT:
                runs.import_modules(known.modules)
    except ValueError as error:
        return runs.refuse(error)
    if known.command == "plan":
        return tools.plan(known, rest)
    if known.command == "port":
        return tools.port(known, rest)
    if known.command == "explain":
        return explain.explain(known, rest, __version__)
    if known.command == "doctor" and not (known.config and not _has_megatron()):
        return tools.doctor(known, rest)
    if known.command == "verify" and not (known.config and not _has_megatron()):
        return tools.verify(known, rest)
    if known.command != "recipes" and not _has_megatron():
        return runs.refuse(
            ValueError(f"`parallel-rl {known.command}` needs megatron-core: pip install 'parallel-rl[megatron]'")
        )
    if known.command == "train":
        if arguments is None:  # the process is ours, and seconds of imports follow
            preemption.listen()
        return runs.train(known.recipe, rest, known.gate, known.dump_step)
    if known.command == "check":
        return runs.check(
            known.recipe, known.world, f"{known.world} ranks", rest, known.modules, dump_step=known.dump_step
        )
    if known.command == "sample":
        return sample.sample(known, rest)
    if known.command == "export":
        return export.export(known, rest)
    if known.command == "submit":
        return submit.submit(known, rest)
    if known.command == "data":
        return runs.data(known.recipe, known.steps, rest)
    if rest:
        return runs.refuse(ValueError(f"{rest[0]!r} is not an argument of `parallel-rl recipes`"))
    return runs.recipes()


def _has_megatron() -> bool:
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # its parent is not there
        return False
