"""`parallel-rl doctor [--config CONFIG] [--world] [--json]`: findings on the stack, and the exit status."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_rl.doctor import Finding
    from parallel_rl.testing.whole_step.known_faults import RunFacts


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the installed stack: packages, megatron-core's contracts, a job's ranks",
        description="Reports what is installed and which known faults it has, by running tiny cases on the installed "
        "megatron-core on CPU; with --config, which layers, attention, backend and optimizer that run would get, and why; with "
        "--world, under torchrun or srun, hosts, clocks and the speed of each group. Exit status: 0, 1 if a finding is an "
        "error, 2 for bad input.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="CONFIG", help="a run's YAML file")
    parser.add_argument("--world", action="store_true", help="probe the ranks of this job")
    for name in ("tensor", "context", "pipeline"):
        parser.add_argument(
            f"--{name}",
            metavar="N",
            type=int,
            help=f"number of {name} ranks in --world's groups; default: the config's",
        )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


@dataclass(frozen=True)
class OfConfig:
    """Facts about a run's config for the doctor."""

    findings: Sequence[Finding] = ()  # about what the run would get
    sizes: tuple[int, int, int] = (1, 1, 1)  # of its tensor, context and pipeline groups
    urls: Sequence[str] = ()  # of its servers
    facts: RunFacts | None = None  # for the known faults of megatron-core that it reaches


def run(known: argparse.Namespace, of_config: Callable[[str], OfConfig]) -> int:
    """Print the findings, on rank 0 of a job; return the exit status.

    Raises:
        ValueError: a config that does not load, --world outside a job, sizes without --world or that do not divide it.
    """
    from parallel_rl.doctor import as_text, exit_status
    from parallel_rl.doctor.faults import ask_contracts, ask_faults
    from parallel_rl.doctor.packages import ask_ports, packages, settings
    from parallel_rl.doctor.world import Sizes, ask_world

    first = os.environ.get("RANK", "0") == "0"
    from_flags = [known.tensor, known.context, known.pipeline]
    if any(size is not None for size in from_flags) and not known.world:
        raise ValueError("--tensor, --context and --pipeline have no effect without --world")
    config = OfConfig() if known.config is None else of_config(known.config)
    sizes = Sizes(*(of_run if size is None else size for size, of_run in zip(from_flags, config.sizes, strict=True)))
    findings = [*packages(), *settings(), *config.findings, *ask_ports(config.urls)]
    of_host = tuple(findings)
    if first and any(
        finding.subject == "megatron-core" and finding.severity in ("ok", "warning") for finding in findings
    ):
        findings += ask_contracts()
        findings += [] if known.world else ask_faults(config.facts)  # not while the job's other ranks wait
    if known.world:
        findings += ask_world(sizes, of_host)
    if first:
        print(json.dumps([asdict(finding) for finding in findings], indent=1) if known.json else as_text(findings))
    return exit_status(findings)
