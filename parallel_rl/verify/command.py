"""`parallel-rl verify`: which losses, on which layouts, where, and what is shown."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_rl.hosts.registry import FRAMEWORKS

if TYPE_CHECKING:
    from parallel_rl.testing.cases import Subject
    from parallel_rl.testing.report import Report

BROKEN = 1  # exit status if the law does not hold; 2 is bad input


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options; imports nothing of torch."""
    parser = commands.add_parser(
        "verify",
        help="check that losses, ours or yours, give the same numbers on every layout",
        description="Runs each loss on real ranks of this machine, or of the job under torchrun or srun, against one float64 "
        "process, and reports what breaks the law, by what factor, and how to fix it. Exit status: 0, 1 if the law is broken, "
        "2 for bad input.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--loss",
        action="append",
        default=[],
        metavar="NAME|MODULE:OBJECT",
        help="a registered loss, or a class, an instance or a function of a module; may be repeated (default: all registered)",
    )
    parser.add_argument("--options", metavar="JSON", help="config of the loss, such as '{\"ratio_clip_min\": 0.1}'")
    parser.add_argument(
        "--config", metavar="CONFIG", help="the loss of this run, as `parallel-rl train CONFIG` builds it"
    )
    parser.add_argument(
        "--through",
        choices=("groups", "megatron", *FRAMEWORKS),
        default="groups",
        help="how the loss is run: alone on process groups; in megatron-core's schedule, with its pipeline, its loss "
        "callback and its data parallelism; or in the call of another framework, over data ranks and micro-batches (default: "
        "groups)",
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:PROVIDER",
        help="with --through megatron: check one optimizer step of this model in place of losses; a function config → "
        "GPTModel, as Megatron-LM's model_provider, or a config with provide()",
    )
    parser.add_argument(
        "--model-config",
        metavar="MODULE:OBJECT",
        help="TransformerConfig of --model at full size, or a function that returns it (default: `config` of its module)",
    )
    parser.add_argument(
        "--forward-step", metavar="MODULE:FUNCTION", help="run --model by this forward step of a Megatron script"
    )
    parser.add_argument(
        "--loss-callback",
        metavar="MODULE:FUNCTION",
        help="run --model on labels, with this loss callback of a Megatron script, (loss_mask, losses)",
    )
    parser.add_argument(
        "--setup", metavar="MODULE:FUNCTION", help="call this with the config on each rank before --model is built"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        metavar="AXIS=N,N",
        help="tp=1,2 cp=1,2 dp=1,2 micro=1,3 packing=padded,packed,tree, and pp=1,2 through megatron: every combination "
        "(default: a choice on 1, 2 and 4 ranks); for --model also vp, ep, etp and sp, per_token, recompute = true, false",
    )
    parser.add_argument(
        "--fields", metavar="NAME,NAME", default="", help="fields of the data that a plain function reads"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=120.0,
        help="limit for one loss on one number of ranks (120)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the reports as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write the reports as a self-contained page")


def run(arguments: argparse.Namespace, of_config: Callable[[str], Subject]) -> int:
    """Run the command; return the exit status: 1 if a loss breaks the law, else 0.

    `of_config` makes the loss of a run's config.

    Raises:
        ValueError: a loss, an option or a layout that does not fit.
    """
    from parallel_rl.testing.check import Limits
    from parallel_rl.verify.run import find_way, in_job, on_this_machine
    from parallel_rl.verify.words import of_words

    if not 0 < arguments.timeout < math.inf:
        raise ValueError(f"--timeout {arguments.timeout:g} is not valid; a positive number of seconds is needed")
    for path in (arguments.json, arguments.html):
        if path not in (None, "-") and Path(path).is_dir():
            raise ValueError(f"{path} is a folder; a file's name is needed")
        if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {Path(path).absolute().parent}")
    if arguments.model is not None:
        from parallel_rl.verify.whole_step import run_model

        return run_model(arguments)
    for name in ("model_config", "forward_step", "loss_callback", "setup"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect without --model")
    layouts = None if arguments.layouts is None else of_words(arguments.layouts)
    if arguments.through != "megatron" and any(layout.pp > 1 for layout in layouts or ()):
        raise ValueError(
            "--layouts pp=2 has no effect on process groups: stages are Megatron's; add --through megatron"
        )
    way = find_way("megatron" if arguments.through == "megatron" else "groups")
    subjects = _subjects(arguments, of_config)
    if arguments.through in FRAMEWORKS:
        from parallel_rl.verify.words import through_host

        if not (arguments.loss or arguments.config):
            raise ValueError(f"--through {arguments.through} needs --loss or --config: a host feeds some losses only")
        subjects = [through_host(arguments.through, subject) for subject in subjects]
    limits, quiet = Limits(timeout=arguments.timeout), arguments.json == "-"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        reports = in_job(subjects, layouts, limits, way, lambda reports: _write(arguments, reports), lines=not quiet)
    else:
        reports = on_this_machine(subjects, layouts, limits, way, show=not quiet)
        _write(arguments, reports)
    return 0 if all(report.ok for report in reports) else BROKEN


def _write(arguments: argparse.Namespace, reports: Sequence[Report]) -> None:
    from parallel_rl.verify.run import html, table

    text = json.dumps(
        {"ok": all(report.ok for report in reports), "losses": [report.as_json() for report in reports]}, indent=1
    )
    if arguments.json == "-":
        print(text)
    else:
        table(reports)
        if arguments.json:
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    if arguments.html:
        Path(arguments.html).write_text(html(reports), encoding="utf-8")


def _subjects(arguments: argparse.Namespace, of_config: Callable[[str], Subject]) -> list[Subject]:
    from parallel_rl.verify.words import every_loss, find_loss

    try:
        options = json.loads(arguments.options) if arguments.options else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"--options {arguments.options!r} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"--options {arguments.options!r} must be a mapping")
    if arguments.config is not None:
        if arguments.loss or options:
            raise ValueError("--config names the loss and its options; leave --loss and --options out")
        return [of_config(arguments.config)]
    if options and len(arguments.loss) != 1:
        raise ValueError("--options goes with exactly one --loss")
    sys.path.insert(0, os.getcwd())  # the user's modules, also for the ranks
    if not arguments.loss:
        return every_loss()
    fields = tuple(name for name in arguments.fields.split(",") if name)
    return [find_loss(text, options, fields) for text in arguments.loss]
