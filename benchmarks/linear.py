"""The LM head and its loss, forward + backward: ours from hidden states beside a matmul followed by each peer's cross-entropy.

Every method gets the same hidden states, weight and targets, and one of two objectives: a weight per token, or the whole GRPO
loss; it is checked against float64 before it is timed. Memory is the peak beyond the inputs and their two gradients. With --tp
the words are split over that many processes, and figures are of one process.
`python -m benchmarks.linear --help`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.common import (
    CpuClock,
    Seconds,
    keep_freed_memory,
    peak_bytes,
    return_freed_memory,
    run_ranks,
    short_collections,
)
from benchmarks.linear_case import Case, Layout, Objective, Shape, grpo, make_case, weighted
from benchmarks.linear_methods import Method, methods
from benchmarks.peers import COMPILED, MEGATRON, join_megatron, results_of
from benchmarks.report import Growth, add_report_options, matmul_rate, report

MEMORY = 1 / 5  # of the lowest-memory peer's, for in_forward and recompute
TIME = {"in_forward": 1.1, "recompute": 1.6}  # of the fastest peer's
# one H200, M 8192, D 4096, V 131072, bfloat16
GPU_SECONDS = {"in_forward": 0.038, "resident": 0.038, "recompute": 0.048}
# beyond the gradients: the default budget, and what a float32 sum of the weight's gradient would take beyond a bfloat16 one
GPU_BYTES = {"in_forward": 1.05 * (2**31 + 2 * 4096 * 131072), "recompute": 1.05 * 2**31}
ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative and norm-wise, of loss and gradients against float64
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # through gloo Megatron's all-reduces would go over the host, and wait
GROWS = ("ours, in_forward", "ours, recompute", f"matmul + {COMPILED}", f"matmul + {MEGATRON}")


@dataclass(frozen=True)
class Figures:
    """seconds of forward + backward: of this process's CPUs, or of the GPU. bytes: peak beyond inputs and gradients."""

    seconds: Seconds
    bytes: int
    errors: tuple[float, float, float]


def step(method: Method, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of hidden, gradient of weight)."""
    hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
    loss = method.run(hidden, weight, case)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def check_result(method: Method, case: Case) -> tuple[float, float, float]:
    """Relative errors of loss and gradients.

    Raises:
        RuntimeError: the method is wrong, so that its time says nothing.
    """
    loss, *gradients = step(method, case)
    truth = case.truths[method.objective]
    errors = [((loss.double() - truth.loss).abs() / truth.scale).item()]
    errors += [((x.double() - y).norm() / y.norm()).item() for x, y in zip(gradients, truth[2:], strict=True)]
    limit = ERROR[torch.bfloat16 if method.low_precision else case.hidden.dtype]
    if not max(errors) <= limit:
        raise RuntimeError(f"{method.name} is wrong: relative errors {', '.join(f'{e:.1e}' for e in errors)}")
    return errors[0], errors[1], errors[2]


def time_once(method: Method, case: Case) -> float:
    if case.hidden.is_cuda:
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(method, case)
        torch.cuda.synchronize()
        return time.perf_counter() - start
    _together(case)
    clock = CpuClock()
    step(method, case)
    return clock()


def _together(case: Case) -> None:
    if case.part.size > 1:
        dist.barrier()


def measure_memory(method: Method, case: Case, passes: int = 2) -> int:
    """Peak bytes beyond inputs and gradients; the least of the passes."""
    gradients = sum(x.numel() * x.element_size() for x in (case.hidden, case.weight))
    peaks = []
    for _ in range(passes):
        _together(case)
        peaks.append(peak_bytes(partial(step, method, case), case.hidden.device.type))
    return max(0, min(peaks) - gradients)


def _start(chosen: Sequence[Method], tp: int) -> None:
    if any("Megatron" in method.name for method in chosen):
        join_megatron(tp)


def measure(
    rank: int, shape: Shape, layout: Layout, dtype: torch.dtype, repeats: int, budget: int | None, device: str
) -> tuple[dict[str, Figures], float]:
    """Measure every method on this rank, and the TFLOP/s of a matrix product."""
    if device == "cpu":
        return_freed_memory()
    chosen = methods(device, budget, layout.tp)
    _start(chosen, layout.tp)
    case = make_case(shape, dtype, device, layout.part(rank))
    return measure_case(chosen, case, repeats, device), matmul_rate(device, dtype)


def measure_case(chosen: Sequence[Method], case: Case, repeats: int, device: str) -> dict[str, Figures]:
    """Check every method against the truth, then measure it; repeats are interleaved: a busy moment hits all alike."""
    errors = results_of(chosen, lambda m: check_result(m, case), device)  # compiles, too
    chosen = [m for m in chosen if m.name in errors]
    case = case._replace(truths={})
    memory = {m.name: measure_memory(m, case) for m in chosen}
    if device == "cpu":
        keep_freed_memory()
    times: dict[str, list[float]] = {m.name: [] for m in chosen}
    with short_collections():
        for _ in range(repeats):
            for m in chosen:
                times[m.name].append(time_once(m, case))
    return {m.name: Figures(Seconds.of(times[m.name]), memory[m.name], errors[m.name]) for m in chosen}


def over_ranks(ranks: Sequence[Figures]) -> Figures:
    """Seconds of the average process, memory and errors of the worst."""
    loss, hidden, weight = (max(errors) for errors in zip(*(r.errors for r in ranks), strict=True))
    return Figures(Seconds.mean([r.seconds for r in ranks]), max(r.bytes for r in ranks), (loss, hidden, weight))


def measure_points(
    rank: int, shapes: Sequence[Shape], layout: Layout, dtype: torch.dtype, device: str
) -> list[dict[str, float]]:
    """Seconds of a few methods at each shape."""
    budget = 1 << 24 if device == "cpu" else None
    if device == "cpu":
        keep_freed_memory()
    chosen = [m for m in methods(device, budget, layout.tp) if m.name in GROWS]
    _start(chosen, layout.tp)
    found = []
    for shape in shapes:
        case = make_case(shape, dtype, device, layout.part(rank), truths=False)
        for m in chosen:
            time_once(m, case)
        found.append({m.name: min(time_once(m, case) for _ in range(2)) for m in chosen})
    return found


def growth_points(shape: Shape, layout: Layout, device: str) -> list[tuple[str, int, Shape, int]]:
    """(axis, number, shape, processes) as T, V or D doubles, and on a CPU as more processes share the vocabulary."""
    points = [
        (axis, n, shape._replace(**{field: n}), layout.tp)
        for axis, field in (("T", "tokens"), ("V", "vocab"), ("D", "hidden"))
        for n in (getattr(shape, field) // k for k in (4, 2, 1))
    ]
    if device == "cpu":
        points += [("TP", tp, shape, tp) for tp in (1, 2, 4)]
    return points


def measure_growth(shape: Shape, layout: Layout, dtype: torch.dtype, device: str) -> Growth:
    """Seconds of the average process at `growth_points`."""
    points = growth_points(shape, layout, device)
    growth: Growth = {}
    for tp in sorted({tp for *_, tp in points}):
        here = [point for point in points if point[-1] == tp]
        shapes = [shape for _, _, shape, _ in here]
        of_tp = layout._replace(tp=tp)
        ranks = run_ranks(tp, measure_points, shapes, of_tp, dtype, device, timeout=3600.0, backend=BACKENDS[device])
        for (axis, n, *_), *seconds in zip(here, *ranks, strict=True):
            for name in seconds[0]:
                line = growth.setdefault(axis, {}).setdefault(name, {})
                line[n] = sum(of_rank[name] for of_rank in seconds) / tp
    return growth


def best_peer(results: dict[str, Figures], chosen: Sequence[Method], objective: Objective) -> tuple[float, int]:
    """The least seconds and the least bytes of the peers with this objective."""
    peers = [results[m.name] for m in chosen if m.kind == "peer" and m.objective is objective]
    return min(p.seconds.least for p in peers), max(1, min(p.bytes for p in peers))


def missed(results: dict[str, Figures], chosen: Sequence[Method], device: str, *, on_h200: bool = False) -> list[str]:
    """List the missed targets; a card's are an H200's, `on_h200` at the sizes and the budget that they were set for."""
    lines = []
    for m in chosen:
        mine, mode = results[m.name], m.name.removeprefix("ours, ")
        least_time, least_bytes = best_peer(results, chosen, m.objective)
        if on_h200 and mode in GPU_SECONDS:
            if mine.seconds.least > GPU_SECONDS[mode]:
                lines.append(f"{m.name} takes {1e3 * mine.seconds.least:.1f} ms, over {1e3 * GPU_SECONDS[mode]:.0f}")
            if m.kind != "information" and mine.bytes > GPU_BYTES[mode]:
                most = GPU_BYTES[mode] / 1e9
                lines.append(f"{m.name} takes {mine.bytes / 1e9:.2f} GB beyond the gradients, over {most:.2f}")
        if device == "cpu" and m.kind in TIME:
            time_ratio, memory_ratio = mine.seconds.least / least_time, mine.bytes / least_bytes
            if time_ratio > TIME[m.kind]:
                lines.append(f"{m.name} takes {time_ratio:.2f} x the time of the fastest peer, over {TIME[m.kind]}")
            if memory_ratio > MEMORY:
                lines.append(f"{m.name} takes {memory_ratio:.2f} x the memory of the lowest-memory peer, over {MEMORY}")
    return lines


def _has_goals(shape: Shape, dtype: str, budget: int | None) -> bool:
    of_goals = (*shape, dtype, budget) == (8192, 131072, 4096, "bfloat16", None)
    return of_goals and "H200" in torch.cuda.get_device_name()


def table(
    results: dict[str, Figures], chosen: Sequence[Method], objective: Objective, title: str, flops: float
) -> Table:
    best = best_peer(results, chosen, objective)
    made = Table(title=title)
    made.add_column("method", no_wrap=True)
    for column in (
        "s",
        "/ fastest peer",
        "TFLOP/s",
        "extra MB",
        "/ lowest-memory peer",
        "errors: loss, hidden, weight",
    ):
        made.add_column(column, justify="right")
    for m in chosen:
        if m.objective is not objective:
            continue
        row = results[m.name]
        made.add_row(
            m.name,
            f"{row.seconds.least:.4f} ({row.seconds.median:.4f})",
            f"{row.seconds.least / best[0]:.2f}",
            f"{flops * (8 if m.kind == 'recompute' else 6) / row.seconds.least / 1e12:.3g}",
            f"{row.bytes / 1e6:.1f}",
            f"{row.bytes / best[1]:.3f}",
            ", ".join(f"{e:.0e}" for e in row.errors),
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    parser.add_argument("--tokens", type=int, help="default: 2048, on a GPU 8192")
    parser.add_argument("--vocab", type=int, help="default: 32768, on a GPU 131072")
    parser.add_argument("--hidden", type=int, help="default: 512, on a GPU 4096")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32, on a GPU bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tp", type=int, default=1, help="processes that share the words, one thread each (CPU only)")
    parser.add_argument("--sequence-parallel", action="store_true", help="they share the hidden states, too")
    parser.add_argument(
        "--budget", type=int, help="bytes; default: 1/6 of a process's float32 logits, on a GPU the library's own"
    )
    parser.add_argument("--repeats", type=int, default=5)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    gpu, tp = options.device == "cuda", options.tp
    shape = Shape(
        options.tokens or (8192 if gpu else 2048),
        options.vocab or (131072 if gpu else 32768),
        options.hidden or (4096 if gpu else 512),
    )
    name = options.dtype or ("bfloat16" if gpu else "float32")
    if min(*shape, options.repeats, tp) < 1 or (options.budget is not None and options.budget < 1):
        parser.error("sizes must be positive")
    if gpu and tp > 1:
        parser.error("--tp is of processes on a CPU")
    parts = 4 * tp if options.growth and not gpu else tp
    if shape.vocab % parts or (options.sequence_parallel and shape.tokens % parts):
        parser.error(f"--vocab, and with --sequence-parallel --tokens, must be divisible by {parts}")
    if tp > 1 and find_spec("megatron") is None:
        parser.error("the peers that know shards are missing: pip install -r benchmarks/peers.txt")
    dtype, layout = getattr(torch, name), Layout(tp, options.sequence_parallel)
    flops = shape.tokens * shape.vocab * shape.hidden // tp
    budget = options.budget
    if budget is None and not gpu:
        budget = max(shape.tokens * shape.vocab // tp * 4 // 6, 1 << 16)
    given = shape, layout, dtype, options.repeats, budget, options.device
    ranks = run_ranks(tp, measure, *given, timeout=3600.0, backend=BACKENDS[options.device])
    chosen = [m for m in methods(options.device, budget, tp) if m.name in ranks[0][0]]
    results = {m.name: over_ranks([figures[m.name] for figures, _ in ranks]) for m in chosen}
    growth = measure_growth(shape, layout, dtype, options.device) if options.growth else None
    clock = "seconds" if gpu else "CPU-seconds, one thread" if tp == 1 else "CPU-seconds of a process"
    bars = {
        clock: {m.name: results[m.name].seconds.least for m in chosen},
        "MB beyond inputs and gradients": {m.name: results[m.name].bytes / 1e6 for m in chosen},
    }
    sizes = {"T": shape.tokens, "V": shape.vocab, "D": shape.hidden, "TP": tp}
    sizes |= {"sequence parallel": options.sequence_parallel, "dtype": name, "budget": budget, "device": options.device}
    return report(
        options,
        sizes,
        [
            table(
                results, chosen, objective, f"the LM head, {what}, forward + backward: {clock}, least (median)", flops
            )
            for objective, what in ((weighted, "a weight per token"), (grpo, "the whole GRPO loss"))
        ],
        {name: asdict(row) for name, row in results.items()},
        missed(results, chosen, options.device, on_h200=gpu and _has_goals(shape, name, budget)),
        bars,
        growth,
        {"matmul TFLOP/s": sum(rate for _, rate in ranks) / tp},
    )


if __name__ == "__main__":
    sys.exit(main())
