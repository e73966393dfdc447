"""The command `port`: another framework's config in our keys, with remarks on the differences."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "port",
        help="translate a config of NeMo-RL or verl into our keys",
        description="Writes our YAML to standard output or to a file, and reports on standard error which defaults differ "
        "and what that does to the gradient, and what becomes of every key. Exit status: 0, or 2 for bad input.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a YAML file of NeMo-RL, or the config of verl that Hydra joins (.hydra/config.yaml)",
    )
    parser.add_argument("--out", metavar="FILE", help="write our YAML to this file")
    parser.add_argument("--report", metavar="FILE", help="write what becomes of every key to this file, as JSON lines")


def run(arguments: argparse.Namespace) -> int:
    """Convert the file; ValueError if it cannot be read or written, or its framework is unknown."""
    import yaml

    from parallel_rl.hosts.port_report import write
    from parallel_rl.port.options import options_of, read_host_config

    ported = options_of(read_host_config(Path(arguments.config)))
    text = f"# From {ported.framework}: {Path(arguments.config).name}\n" + yaml.safe_dump(
        ported.config, sort_keys=False
    )
    for line in ported.lines():
        print(line, file=sys.stderr)
    if arguments.report is not None:
        write(ported.rows, Path(arguments.report))
    if arguments.out is None:
        print(text, end="")
    else:
        try:
            Path(arguments.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--out {arguments.out} cannot be written: {error}") from None
    return 0
