"""`parallel-rl plan MODEL --tokens T [--tensor N ...]`: what fits, in which mode, and the fastest possible step."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_rl.plan.source import Source

_DTYPES = ("bfloat16", "float16", "float32")
_LAYOUT = ("tensor", "context", "pipeline", "data", "sequence_parallel")  # flags named as the layout's fields
_MOST_UNREAD = 12  # unread keys named in the output


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict a rank's memory and a step's lower bound from a model's sizes, without a GPU",
        usage="parallel-rl plan MODEL --tokens T [--tensor N] [--context N] [--pipeline N] [--data N] [--sequence-parallel] "
        "[--whole-optimizer] [--dtype DTYPE] [--micro-batches N] [--frozen N] [--budget BYTES] [--card CARD] [--memory GIB] "
        "[--plot FILE] [--json]",
        description="Predicts the memory of a rank (weights, gradients, optimizer, and the loss stage in each of its modes), "
        "recommends a mode, and gives lower bounds of a step's time on up to 10,000 GPUs. MODEL is a Hugging Face config.json "
        "or its folder, Megatron's arguments in YAML or JSON, or a config of `parallel-rl train`. Of the latter "
        "two the layout and the dtype are taken as well, unless a flag says otherwise.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="config.json or its folder, Megatron's arguments, or a config")
    parser.add_argument(
        "--tokens", type=int, required=True, metavar="T", help="tokens of a data rank's micro-batch, padding included"
    )
    for name in ("tensor", "context", "pipeline", "data"):
        parser.add_argument(f"--{name}", metavar="N", type=int, help=f"number of {name} parallel ranks (1)")
    parser.add_argument(
        "--sequence-parallel", action=argparse.BooleanOptionalAction, help="hidden states are split over tensor ranks"
    )
    parser.add_argument(
        "--whole-optimizer", action=argparse.BooleanOptionalAction, help="every data rank holds all of Adam's state"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (bfloat16)")
    parser.add_argument("--micro-batches", metavar="N", type=int, default=1, help="micro-batches per step (1)")
    parser.add_argument(
        "--frozen", metavar="N", type=int, default=0, help="number of further models: reference, teacher (0)"
    )
    parser.add_argument(
        "--budget", metavar="BYTES", type=int, help="budget of the LM head's logits; default: that of `LMHeadInput`"
    )
    parser.add_argument("--card", default="H100", help="A100, H100, H200 or B200 (H100)")
    parser.add_argument("--memory", metavar="GIB", type=float, help="memory of the card; default: its data sheet's")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture (PNG, SVG or PDF)")
    parser.add_argument("--json", action="store_true", help="print numbers only, in bytes and seconds")


def run(
    known: argparse.Namespace, read: Callable[[str, Mapping[str, object]], Source], say: Callable[[str], object]
) -> int:
    """Print the plan by `say`; return 0 if some mode fits, else 1.

    `read` turns MODEL and the layout fields given by flags into a source.
    ValueError: an unreadable model, sizes that the layout cannot divide.
    """
    import torch

    from parallel_rl.plan.memory import Layout
    from parallel_rl.plan.report import draw, plan_run, table

    if known.memory is not None and not 0 < known.memory < math.inf:
        raise ValueError(f"--memory {known.memory} must be a positive number of GiB")
    from_flags = {name: getattr(known, name) for name in _LAYOUT if getattr(known, name) is not None}
    if known.dtype is not None:
        from_flags["dtype"] = getattr(torch, known.dtype)
    if known.whole_optimizer is not None:
        from_flags["distributed_optimizer"] = not known.whole_optimizer
    source = read(known.model, from_flags)
    plain = Layout(known.tokens, frozen=known.frozen, budget=known.budget)
    layout = replace(plain, **{**source.layout, **from_flags})
    memory = None if known.memory is None else int(known.memory * 2**30)
    plan = plan_run(source.shape, layout, known.card, known.micro_batches, memory)
    of_model = [name for name in source.layout if name not in from_flags]
    if known.json:
        say(
            json.dumps(
                {**plan.as_json(), "layout_of_model": of_model, "not_read": source.unread, "data": source.data},
                indent=1,
            )
        )
    else:
        say("\n".join([*_of_source(known.model, of_model, source.unread), *source.data, table(plan)]))
    if known.plot is not None:
        draw(plan, Path(known.plot))
    return 0 if plan.recommended(separable=False) is not None else 1


def _of_source(model: str, of_model: Sequence[str], unread: Sequence[str]) -> Iterator[str]:
    """List MODEL's other decisions than sizes, and its keys that were not read."""
    if of_model:
        yield f"taken from {model}: {', '.join(of_model)}"
    if unread:
        more = f" and {len(unread) - _MOST_UNREAD} more" if len(unread) > _MOST_UNREAD else ""
        yield f"not read of {model}: {', '.join(unread[:_MOST_UNREAD])}{more}"
