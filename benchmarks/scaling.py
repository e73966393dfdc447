"""How the cost of a GRPO loss grows with tokens, vocabulary, tensor ranks and packed sequences: ours, and a loop over them.

The loop is written here after the design that NeMo-RL publishes: a packed row is taken apart, and each sequence's log-probs
come from a float32 copy of its logits with three all-reduces over the tensor ranks (maximum, sum, target). It shows what the
design costs, not what anybody's code does. Exponents are fitted: cost ∝ size^e. `python -m benchmarks.scaling --help`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.common import CountOperators, CpuClock, Seconds, keep_freed_memory, run_ranks, short_collections
from benchmarks.losses_case import GRPO, GRPO_FIELDS, agree, grpo_terms, make_data
from benchmarks.report import Growth, add_report_options, report
from parallel_rl import PolicyLossFn, SequencePackingLossWrapper, count_valid

OURS, LOOP = "ours", "a loop over sequences"
MOST = {"T": 1.1, "V": 1.1, "TP": 0.3, "sequences": 0.15}  # our exponents, of seconds
FLAT = 0.01  # our exponent of operators with the number of sequences


class Point(NamedTuple):
    """One packed row: T tokens in some sequences, V vocabulary entries on some tensor ranks."""

    tokens: int
    vocab: int
    sequences: int
    tp: int


@dataclass(frozen=True)
class Figures:
    """Forward + backward of the average process: CPU-seconds, operators dispatched, collectives among them."""

    seconds: Seconds
    operators: int
    collectives: int


class _LogProbs(torch.autograd.Function):
    """Log-probs of the targets [T] from this rank's columns [T, V/tp], through the whole softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int) -> Tensor:
        z = logits.float()
        top = z.amax(1, keepdim=True)
        _all_reduce(top, dist.ReduceOp.MAX)
        z = z - top
        softmax = z.exp()
        total = softmax.sum(1, keepdim=True)
        _all_reduce(total)
        softmax /= total
        local = targets - start
        here = (local >= 0) & (local < z.shape[1])
        column = torch.where(here, local, 0)[:, None]
        chosen = torch.where(here, z.gather(1, column)[:, 0], 0.0)
        _all_reduce(chosen)
        ctx.save_for_backward(softmax, column, here)
        ctx.dtype = logits.dtype
        return chosen - total[:, 0].log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, column, here = ctx.saved_tensors
        dz = softmax * -grad[:, None]
        dz.scatter_add_(1, column, torch.where(here, grad, 0.0)[:, None])
        return dz.to(ctx.dtype), None, None


def _all_reduce(x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x, op)


def loop_over_sequences(logits: Tensor, data: Mapping[str, Tensor], tokens: Tensor, start: int) -> Tensor:
    """GRPO of a packed row [1, T, V/tp], sequence by sequence."""
    loss, at = logits.new_zeros(()), 0
    for row, ids in enumerate(data["input_ids"]):
        piece = logits[0, at : at + len(ids)]
        at += len(ids)
        logprobs = _LogProbs.apply(piece, ids.roll(-1), start)[:-1]
        mask = (data["token_mask"][row, 1:] * data["sample_mask"][row]).to(logprobs.dtype)
        terms = grpo_terms(logprobs, *(data[field][row, 1:] for field in GRPO_FIELDS))
        loss = loss + (terms * mask).sum() / tokens
    return loss


def measure(rank: int, points: Sequence[Point], repeats: int) -> list[dict[str, Figures]]:
    """Measure both at each point on this rank, once they agree; repeats are interleaved."""
    keep_freed_memory()
    found: list[dict[str, Seconds]] = []
    for point in points:
        steps = _steps(rank, point)
        agree(LOOP, steps[LOOP](), steps[OURS]())
        times: dict[str, list[float]] = {name: [] for name in steps}
        with short_collections():
            for _ in range(repeats):
                for name, step in steps.items():
                    if point.tp > 1:
                        dist.barrier()
                    clock = CpuClock()
                    step()
                    times[name].append(clock())
        found.append({name: Seconds.of(times[name]) for name in steps})
    # last: code compiled inside a counter stays slower
    return [
        {name: Figures(seconds[name], *_counted(step)) for name, step in _steps(rank, point).items()}
        for point, seconds in zip(points, found, strict=True)
    ]


def _counted(step: Callable[[], object]) -> tuple[int, int]:
    step()
    with CountOperators() as counter:
        step()
    return counter.count, counter.collectives


def _steps(rank: int, point: Point) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    data, width = make_data(point.tokens, point.vocab, point.sequences), point.vocab // point.tp
    g = torch.Generator().manual_seed(1)
    whole = torch.cat([torch.randn(1, point.tokens, width, generator=g) for _ in range(point.tp)], -1)
    logits = whole[..., rank * width : (rank + 1) * width].clone()
    work, counts = torch.empty_like(logits), count_valid([data])
    bounds = torch.arange(point.sequences + 1, dtype=torch.int32) * (point.tokens // point.sequences)
    loss_fn = SequencePackingLossWrapper(PolicyLossFn(GRPO, consume_logits=True), bounds)
    group = dist.group.WORLD if point.tp > 1 else None

    def step(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        work.copy_(logits)
        leaf = work.detach().requires_grad_()
        loss = function(leaf)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient.clone()

    def ours(z: Tensor) -> Tensor:
        return loss_fn(z, data, *counts, None, group)[0]

    return {
        OURS: lambda: step(ours),
        LOOP: lambda: step(lambda z: loop_over_sequences(z, data, counts.toks, rank * width)),
    }


def points_of(tokens: int, vocab: int, tp: int) -> dict[str, dict[int, Point]]:
    """axis → size → point: each axis doubles from a quarter of the size, sequences go by fours."""
    return {
        "T": {n: Point(n, vocab, 16, tp) for n in (tokens // 4, tokens // 2, tokens, 2 * tokens)},
        "V": {n: Point(tokens, n, 16, tp) for n in (vocab // 4, vocab // 2, vocab, 2 * vocab)},
        "TP": {n: Point(tokens, vocab, 16, n) for n in (1, 2, 4)},
        "sequences": {n: Point(tokens, vocab, n, tp) for n in (1, 4, 16, 64)},
    }


def exponent(line: Mapping[int, float]) -> float:
    """The slope of log cost over log size, by least squares.

    >>> round(exponent({1: 3.0, 2: 6.0, 4: 12.0}), 6)
    1.0
    """
    xs, ys = [math.log(n) for n in line], [math.log(cost) for cost in line.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


Results = dict[str, dict[str, dict[int, Figures]]]  # axis → method → size


def run(axes: Mapping[str, Mapping[int, Point]], repeats: int) -> Results:
    """Measure every point, those of one number of ranks in one world."""
    every = sorted({point for line in axes.values() for point in line.values()}, key=lambda p: p.tp)
    of: dict[Point, dict[str, Figures]] = {}
    for tp in sorted({point.tp for point in every}):
        here = [point for point in every if point.tp == tp]
        for point, *ranks in zip(here, *run_ranks(tp, measure, here, repeats, timeout=3600.0), strict=True):
            of[point] = {name: _mean([one[name] for one in ranks]) for name in (OURS, LOOP)}
    return {
        axis: {name: {n: of[point][name] for n, point in line.items()} for name in (OURS, LOOP)}
        for axis, line in axes.items()
    }


def _mean(ranks: Sequence[Figures]) -> Figures:
    return Figures(Seconds.mean([one.seconds for one in ranks]), ranks[0].operators, ranks[0].collectives)


def exponents(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """axis → method → the exponents of seconds and operators; of all ranks together, for that of TP."""
    return {
        axis: {
            name: {
                "seconds": exponent({n: (n if axis == "TP" else 1) * one.seconds.least for n, one in line.items()}),
                "operators": exponent({n: one.operators for n, one in line.items()}),
            }
            for name, line in methods.items()
        }
        for axis, methods in results.items()
    }


def missed(results: Results) -> list[str]:
    """List the missed figures."""
    lines = []
    for axis, of in exponents(results).items():
        grown = of[OURS]["seconds"]
        if grown > MOST[axis]:
            lines.append(f"our seconds grow with {axis} to the power {grown:.2f}, over {MOST[axis]}")
        if axis == "sequences" and of[OURS]["operators"] > FLAT:
            lines.append(f"our operators grow with sequences to the power {of[OURS]['operators']:.2f}, over {FLAT}")
        for n, mine in results[axis][OURS].items():
            ratio = results[axis][LOOP][n].seconds.least / mine.seconds.least
            if ratio <= 1 and (axis, n) != ("sequences", 1):  # the peer's loop has one pass there
                lines.append(f"{axis} {n}: the loop takes {ratio:.2f} x our time")
    return lines


def tables(results: Results) -> list[Table]:
    made = []
    found = exponents(results)
    for axis, methods in results.items():
        one = Table(
            "method", title=f"{axis}: CPU-seconds of a process (operators, collectives), least; fitted exponents"
        )
        for n in methods[OURS]:
            one.add_column(f"{axis} {n}", justify="right")
        one.add_column("seconds ∝" if axis != "TP" else "seconds of all ∝", justify="right")
        one.add_column("operators ∝", justify="right")
        for name, line in methods.items():
            cells = [f"{x.seconds.least:.4f} ({x.operators}, {x.collectives})" for x in line.values()]
            of = found[axis][name]
            one.add_row(name, *cells, f"{axis}^{of['seconds']:.2f}", f"{axis}^{of['operators']:.2f}")
        made.append(one)
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel processes, one thread each")
    parser.add_argument("--repeats", type=int, default=3)
    add_report_options(parser, growth=False)
    options = parser.parse_args(arguments)
    if min(options.tokens, options.vocab, options.tp, options.repeats) < 1:
        parser.error("sizes must be positive")
    if options.tokens % 256 or options.vocab % (16 * options.tp):
        parser.error(f"--tokens must be divisible by 256, --vocab by {16 * options.tp}")
    results = run(points_of(options.tokens, options.vocab, options.tp), options.repeats)
    growth: Growth = {
        axis: {name: {n: one.seconds.least for n, one in line.items()} for name, line in methods.items()}
        for axis, methods in results.items()
    }
    numbers = {
        axis: {name: {str(n): asdict(one) for n, one in line.items()} for name, line in methods.items()}
        for axis, methods in results.items()
    }
    return report(
        options,
        {"T": options.tokens, "V": options.vocab, "TP": options.tp, "repeats": options.repeats},
        tables(results),
        {"figures": numbers, "exponents": exponents(results)},
        missed(results),
        {
            f"{axis}: exponent of seconds": {m: x["seconds"] for m, x in of.items()}
            for axis, of in exponents(results).items()
        },
        growth if options.plot else None,
    )


if __name__ == "__main__":
    sys.exit(main())
