"""The console script `parallel-rl`: its commands, and which of them need megatron-core."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import cast

from parallel_rl import __version__
from parallel_rl.cli import checkpoint, keys, runs, submit, tools
from parallel_rl.cli import tools as explain
from parallel_rl.cli.words import Parser, check_options, options_of, surplus
from parallel_rl.cluster import preemption
from parallel_rl.cluster.preemption import leave
from parallel_rl.config.names import ENVIRONMENT, modules_of_user
from parallel_rl.doctor import command as doctor_command
from parallel_rl.plan import command as plan_command
from parallel_rl.port import command as port_command
from parallel_rl.verify import command as verify_command

_NEVER_IMPORT = ("check", "submit")  # commands on a host that is not the job's, for an unreviewed config
_OF_RUNS = ("train", "check", "data", "sample", "export")  # commands that take config keys
_ABOUT = "Losses for RL post-training, and a reference trainer on Megatron-core."


def _parser() -> tuple[Parser, Mapping[str, argparse.ArgumentParser]]:
    parser = Parser("parallel-rl", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"parallel-rl {__version__}")
    commands = cast(
        "argparse._SubParsersAction[argparse.ArgumentParser]", parser.add_subparsers(dest="command", required=True)
    )
    runs.add_parsers(commands)
    submit.add_parser(commands)
    checkpoint.add_export(commands)
    checkpoint.add_sample(commands)
    plan_command.add_parser(commands)
    port_command.add_parser(commands)
    verify_command.add_parser(commands)
    doctor_command.add_parser(commands)
    explain.add_parser(commands, __version__)
    for name, command in commands.choices.items():
        whose = "the ranks" if name in _NEVER_IMPORT else "first"
        if name != "explain":
            command.add_argument(
                "--import",
                dest="modules",
                metavar="MODULE",
                action="append",
                default=[],
                help=f"{whose} import this module of yours, which registers losses, rewards or loggers (may be repeated; "
                f"{ENVIRONMENT} lists more, separated by commas)",
            )
    runs.add_recipes(commands)
    return parser, commands.choices


def command_parsers() -> Mapping[str, argparse.ArgumentParser]:
    return _parser()[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 for a config, data or world that does not fit.

    The command of the process itself, without `arguments`, ends the process where it is not 0.
    """
    status = _run(sys.argv[1:] if arguments is None else arguments, own_process=arguments is None)
    if status and arguments is None:
        leave(status)
    return status


def _run(arguments: Sequence[str], own_process: bool) -> int:
    if len(arguments) == 3 and arguments[0] == "train" and arguments[1] in ("-h", "--help"):
        return keys.help_of(arguments[2])
    parser, commands = _parser()
    known, rest = parser.parse_known_args(submit.joined(arguments))
    options = options_of(commands[known.command])
    try:
        if known.command in _OF_RUNS:
            named = bool(rest) and not rest[0].startswith("-")
            check_options(rest, options, known.command, named or getattr(known, "recipe", "") is not None)
        if hasattr(known, "modules") and getattr(known, "script", None) is None:  # a loop imports what it needs
            known.modules = modules_of_user(known.modules)
            if known.command not in _NEVER_IMPORT:
                runs.import_modules(known.modules)
    except ValueError as error:
        return runs.refuse(error)
    of_run = known.command in ("doctor", "verify") and known.config  # only the trainer reads a config
    if known.command in tools.TOOLS and (not of_run or _has_megatron()):
        return tools.run_tool(known, rest, options)
    if known.command != "recipes" and not _has_megatron():
        return runs.refuse(
            ValueError(
                f"`parallel-rl {known.command}` needs megatron-core: pip install 'megatron-core>=0.15,<0.20' psutil"
            )
        )
    if known.command == "train":
        if known.print_config:
            return keys.print_config(known.recipe, rest)
        if own_process:  # before seconds of imports
            preemption.listen()
        return runs.train(known.recipe, rest, known.gate, known.dump_step)
    if known.command == "check":
        return runs.check(
            known.recipe, known.world, f"{known.world} ranks", rest, known.modules, dump_step=known.dump_step
        )
    if known.command == "sample":
        return checkpoint.sample(known, rest)
    if known.command == "export":
        return checkpoint.export(known, rest)
    if known.command == "submit":
        return submit.submit(known, rest)
    if known.command == "data":
        return runs.data(known.recipe, known.steps, rest)
    if rest:
        return runs.refuse(ValueError(surplus(rest[0], "recipes", options)))
    return runs.recipes(known.name)


def _has_megatron() -> bool:
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
