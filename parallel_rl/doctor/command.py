"""`parallel-rl doctor [--config CONFIG] [--world] [--json]`: the stack's findings, and an exit status by severity."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_rl.doctor.findings import Finding


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "doctor",
        help="look at the installed stack: packages, megatron-core's contracts, a job's ranks",
        description="Says what is installed and which known faults it has, from tiny cases that are run against the installed "
        "megatron-core on CPU; with --config what layers, attention, backend and optimizer that run would get, and why; with "
        "--world, under torchrun or srun, hosts, clocks and the speed of collectives. Exit status: 0, 1 where something is an "
        "error, 2 for bad input.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="CONFIG", help="a run's YAML file")
    parser.add_argument("--world", action="store_true", help="probe the ranks of this job")
    parser.add_argument("--json", action="store_true", help="findings as JSON")


def run(known: argparse.Namespace, of_config: Callable[[str], Iterable[Finding]]) -> int:
    """Print the findings, on rank 0 of a job; the exit status.

    Args:
        of_config: findings about a run's config.

    Raises:
        ValueError: a config that does not load, --world outside a job.
    """
    from parallel_rl.doctor.contracts import ask_contracts
    from parallel_rl.doctor.findings import as_text, exit_status
    from parallel_rl.doctor.packages import packages, settings
    from parallel_rl.doctor.world import ask_world

    first = os.environ.get("RANK", "0") == "0"
    found = [*packages(), *settings(), *(of_config(known.config) if known.config is not None else ())]
    if first and any(each.subject == "megatron-core" and each.severity in ("ok", "warning") for each in found):
        found += ask_contracts()
    if known.world:
        found += ask_world()
    if first:
        print(json.dumps([asdict(each) for each in found], indent=1) if known.json else as_text(found))
    return exit_status(found)
