"""`parallel-rl plan MODEL --tokens T [--tensor N ...]`: what fits, in which mode, and how fast it can be at best."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_rl.plan.models import ModelShape

_DTYPES = ("bfloat16", "float16", "float32")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "plan",
        help="predict a rank's memory and a step's lower bound from a model's sizes, without a GPU",
        usage="parallel-rl plan MODEL --tokens T [--tensor N] [--context N] [--pipeline N] [--data N] [--sequence-parallel] "
        "[--micro-batches N] [--frozen N] [--dtype DTYPE] [--budget BYTES] [--card CARD] [--memory GIB] [--plot FILE] [--json]",
        description="Predicts the memory of a rank (weights, gradients, optimizer, and the loss stage in each of its modes), "
        "recommends a mode, and bounds a step's time from below over 1 to 10,000 GPUs. MODEL is a Hugging Face config.json or "
        "its folder, Megatron's arguments in YAML or JSON, or a config of `parallel-rl train`.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="config.json or its folder, Megatron's arguments, or a config")
    parser.add_argument("--tokens", type=int, required=True, help="of a micro-batch of a data rank, padding included")
    for name in ("tensor", "context", "pipeline", "data"):
        parser.add_argument(f"--{name}", metavar="N", type=int, default=1, help=f"{name} parallel ranks")
    parser.add_argument("--sequence-parallel", action="store_true", help="hidden states are split over tensor ranks")
    parser.add_argument("--micro-batches", metavar="N", type=int, default=1, help="of a step")
    parser.add_argument(
        "--frozen", metavar="N", type=int, default=0, help="models beside the policy: reference, teacher"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights")
    parser.add_argument("--budget", metavar="BYTES", type=int, help="of the LM head's logits; else its default")
    parser.add_argument("--whole-optimizer", action="store_true", help="every data rank holds all of Adam's state")
    parser.add_argument("--card", default="H100", help="A100, H100, H200 or B200")
    parser.add_argument("--memory", metavar="GIB", type=float, help="of the card, in place of its data sheet's")
    parser.add_argument("--plot", metavar="FILE", help="a picture (PNG, SVG or PDF)")
    parser.add_argument("--json", action="store_true", help="numbers only, in bytes and seconds")


def run(known: argparse.Namespace, read: Callable[[str], ModelShape]) -> int:
    """Print the plan; 0 where some mode fits, 1 where none does.

    Args:
        read: MODEL to its sizes.

    Raises:
        ValueError: a model that cannot be read, sizes that are not divisible as the layout needs.
    """
    import torch

    from parallel_rl.plan.memory import Layout
    from parallel_rl.plan.report import draw, plan_run, table

    if known.memory is not None and not 0 < known.memory < math.inf:
        raise ValueError(f"--memory {known.memory} must be a positive number of GiB")
    layout = Layout(
        known.tokens, known.tensor, known.context, known.pipeline, known.data, known.sequence_parallel,
        getattr(torch, known.dtype), "cuda", not known.whole_optimizer, known.frozen, known.budget,
    )  # fmt: skip
    memory = None if known.memory is None else int(known.memory * 2**30)
    plan = plan_run(read(known.model), layout, known.card, known.micro_batches, memory)
    print(json.dumps(plan.as_json(), indent=1) if known.json else table(plan))
    if known.plot is not None:
        draw(plan, Path(known.plot))
    return 0 if plan.recommended(separable=False) is not None else 1
