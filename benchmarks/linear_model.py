"""A model of the fused head's time on an H200, from what it does: `python -m benchmarks.linear_model` needs no card.

A step runs on the meta device, where every operator is seen with its shapes and nothing is computed. A matrix product takes
its flops at the rate of a large one, its last wave of tiles rounded up, or its bytes where those take longer; everything
else takes the bytes that it reads and writes, at the part of the copy bandwidth that a pass reaches. What runs beside
something else, and what the host needs, is not in it. It is arithmetic, not a measurement.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_rl import linear_token_stats
from parallel_rl.vocab.backends import choice
from parallel_rl.vocab.linear.plan import LinearMode

FLOPS, BANDWIDTH = 790e12, 4.3e12  # of a large bfloat16 product, and of a copy, as measured on an H200
REACHED = 0.87  # of the bandwidth, by a pass
PROCESSORS, TILE = 132, (128, 256)
MODES: tuple[LinearMode, ...] = ("in_forward", "resident", "recompute")
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "promote_types"}
_KINDS = {
    "mm": "products", "addmm": "products", "addmm_": "products",
    "vocab_stats": "statistics", "vocab_row_stats": "statistics", "vocab_stats_half": "statistics",
    "vocab_row_stats_half": "statistics", "vocab_gradient": "gradient", "vocab_gradient_": "gradient",
    "vocab_gradient_to": "gradient", "scale_": "scale",
}  # fmt: skip


def kernel_name(func: OpOverload) -> str | None:
    """The name of an operator that a card runs as kernels; None: it only makes or views a tensor."""
    name: str = func._schema.name.split("::")[1]
    return None if func.is_view or name in _FREE else name


class CardModel(TorchDispatchMode):
    """Seconds by kind of operator: products, statistics, gradient, scale, other."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = run_operator(func, args, kwargs)
        name = kernel_name(func)
        if name is None:
            return out
        kind = _KINDS.get(name, "other")
        read, made = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in (args, out))
        if kind == "products":
            a, b = read[-2:]
            seconds = product_seconds(a.shape[0], a.shape[1], b.shape[1], sum(map(_bytes, [*read, made[0]])))
        else:
            moved = [*read, *made]
            if name == "vocab_gradient_":
                moved.append(read[0])  # written over what was read
            if name in ("copy_", "new_zeros", "zeros_like"):
                moved = moved[1:]  # what is written over, or only has the shape, is not read
            if name in ("index", "index_copy_"):
                moved = 2 * (made if name == "index" else read[-1:])  # some rows
            if name == "scale_":
                moved = read[1:]  # by 1, as it is at the root of a graph
            seconds = sum(map(_bytes, moved)) / (REACHED * BANDWIDTH)
        self.seconds[kind] += seconds
        return out


def run_operator(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
    """What `func` gives; on the meta device, where torch before 2.13 has no product in float32 of narrower operands, too."""
    given = kwargs or {}
    if func._schema.name not in ("aten::mm", "aten::addmm") or "dtype" not in func._overloadname or not args[0].is_meta:
        return func(*args, **given)
    *_, a, b, dtype = args
    product, out = torch.mm(a, b).to(dtype), given.get("out")
    assert out is None or (out.shape, out.dtype) == (product.shape, dtype)
    return product if out is None else out


def product_seconds(m: int, k: int, n: int, moved: int) -> float:
    """Seconds of [m, k] · [k, n], which reads and writes `moved` bytes."""
    tiles = min(math.ceil(m / a) * math.ceil(n / b) for a, b in (TILE, TILE[::-1]))
    waves = math.ceil(tiles / PROCESSORS) * PROCESSORS * TILE[0] * TILE[1]
    return max(2 * waves * k / FLOPS, moved / BANDWIDTH)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def step_seconds(
    mode: LinearMode, rows: int, size: int, vocab: int, budget: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Seconds of a forward and backward from [rows, size] hidden states, by kind."""
    hidden, weight = (torch.empty(n, size, dtype=dtype, device="meta", requires_grad=True) for n in (rows, vocab))
    targets = torch.empty(rows, dtype=torch.int64, device="meta")
    # on the meta device Triton's operators run without their kernels, once they are not refused there
    with mock.patch.object(choice, "_INTERPRETED", True), CardModel() as model:
        stats = linear_token_stats(
            hidden, weight, targets, mode=mode, budget=budget, entropy=False, backend="triton",
            objective=(lambda s: s.logprobs.sum()) if mode == "in_forward" else None,
        )  # fmt: skip
        (stats.logprobs.sum() if stats.loss is None else stats.loss).backward()
    return dict(model.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 8192), ("hidden", 4096), ("vocab", 131072)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    kinds = ["products", "statistics", "gradient", "scale", "other"]
    table = Table(title="milliseconds of a step on an H200, by arithmetic: not run")
    for column in ("mode", "budget", *kinds, "sum"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode in MODES:
        for budget in (448 << 20, 1 << 30, None):
            of = step_seconds(mode, options.rows, options.hidden, options.vocab, budget)
            cells = [f"{1e3 * of.get(kind, 0):.2f}" for kind in kinds]
            table.add_row(
                mode, "default" if budget is None else f"{budget >> 20} MiB", *cells, f"{1e3 * sum(of.values()):.1f}"
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
