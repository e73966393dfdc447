"""Commands that need no run: plan, port, verify, doctor and explain."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_rl.cli.runs import discard_output, quiet, refuse, show
from parallel_rl.cli.words import surplus

if TYPE_CHECKING:
    from parallel_rl.doctor.command import OfConfig
    from parallel_rl.plan.source import Source
    from parallel_rl.testing.cases import Subject


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], version: str) -> None:
    """Add the command and its options, without importing torch."""
    parser = commands.add_parser(
        "explain",
        help="show one dumped step token by token, or two side by side, on a page",
        description="Makes a self-contained HTML page of a step that `parallel-rl train ... --dump-step N` or "
        "parallel_rl.explain.dump_step wrote. Exit status: 0, or 2 for bad input.",
        allow_abbrev=False,
    )
    parser.add_argument("step", metavar="STEP", help="folder of a dumped step, or of a run with one")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="a second dump to compare with the first")
    parser.add_argument("--out", metavar="FILE", default="explain.html", help="the page (explain.html)")
    parser.add_argument("--samples", metavar="N", default="8", help="number of texts shown of each step (8), or 'all'")
    parser.set_defaults(version=version)  # for the page's footer


def write(known: argparse.Namespace) -> int:
    """Write the page; ValueError for bad input, OSError if it cannot be written."""
    from parallel_rl.explain.page import check_extras, page
    from parallel_rl.explain.read import read_step

    check_extras()
    most, out = known.samples, Path(known.out)
    if most != "all" and not most.isdecimal():
        raise ValueError(f"--samples {most} is not valid; give a number, or 'all'")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.absolute().parent}")
    steps = [read_step(path) for path in (known.step, known.other) if path is not None]
    text = page(steps, most_samples=2**31 if most == "all" else int(most), version=known.version)
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    size = out.stat().st_size
    print(f"wrote {known.out} ({size / 1e6:.1f} MB): open it in a browser, or print it", flush=True)
    return 0


_SIGPIPE = 141  # exit status of a program that SIGPIPE ends, in the shell


def run_tool(known: argparse.Namespace, rest: Sequence[str], options: Sequence[str]) -> int:
    """Run the parsed command, refusing leftover words, and return its exit status."""
    try:
        if rest:
            raise ValueError(surplus(rest[0], known.command, options))
        status = TOOLS[known.command](known)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head`: no verdict was read, so the status is none either
        discard_output()
        return _SIGPIPE
    except (ValueError, OSError) as error:
        return refuse(error)


def _plan(known: argparse.Namespace) -> int:
    from parallel_rl.plan.command import run

    return run(known, _read_source, show)


def _port(known: argparse.Namespace) -> int:
    from parallel_rl.port.command import run

    return run(known)


def _read_source(path: str, layout: Mapping[str, object]) -> Source:
    from parallel_rl.config.yaml_files import read_tree
    from parallel_rl.plan.source import read_source

    if not path.endswith((".yaml", ".yml")) or "model" not in read_tree(Path(path)):
        return read_source(path)
    from parallel_rl.training.preflight.facts import planned

    return planned(path, layout)


def _verify(known: argparse.Namespace) -> int:
    from parallel_rl.verify.command import run

    return run(known, _loss_of_config)


def _loss_of_config(path: str) -> Subject:
    from parallel_rl.training.config.load import load_config

    quiet()
    from parallel_rl.training.preflight.gate import own_loss

    return own_loss(load_config(path, []))


def _doctor(known: argparse.Namespace) -> int:
    from parallel_rl.doctor.command import run

    return run(known, _choices)


def _choices(path: str) -> OfConfig:
    from parallel_rl.doctor import Finding
    from parallel_rl.doctor.command import OfConfig
    from parallel_rl.training.config.load import as_mapping, load_config
    from parallel_rl.training.preflight.facts import choices, run_facts

    config = load_config(path)
    findings = [
        Finding(choice.part, "warning" if choice.advice else "ok", choice.text, choice.advice)
        for choice in choices(config)
    ]
    parallel = config.parallel
    sizes = (parallel.tensor, parallel.context, parallel.pipeline)
    return OfConfig(findings, sizes, sorted(set(_urls(as_mapping(config)))), run_facts(config))


def _urls(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _urls(item)
    elif isinstance(value, list):
        for item in value:
            yield from _urls(item)
    elif isinstance(value, str) and value.startswith(("http://", "https://")):
        yield value


TOOLS: dict[str, Callable[[argparse.Namespace], int]] = {
    "plan": _plan, "port": _port, "verify": _verify, "doctor": _doctor, "explain": write,
}  # fmt: skip
