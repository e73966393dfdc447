"""The LM head and its loss, forward + backward: ours from hidden states beside a matmul followed by each peer's cross-entropy.

Every method gets the same hidden states, weight and targets, and one of two objectives: a weight per token, or the whole GRPO
loss; it is checked against float64 before it is timed. Memory is the peak beyond the inputs and their two gradients.
`python -m benchmarks.linear --help`.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import (
    CpuClock,
    PeakMemory,
    Seconds,
    keep_freed_memory,
    return_freed_memory,
    run_ranks,
    short_collections,
)
from benchmarks.linear_methods import Case, Method, Objective, grpo, make_case, methods, weighted
from benchmarks.report import Growth, add_report_options, matmul_rate, report

MEMORY = 1 / 5  # of the frugalest peer's, for in_forward and recompute
TIME = {"in_forward": 1.1, "recompute": 1.6}  # of the fastest peer's
GPU_SECONDS = {
    "in_forward": 0.038,
    "resident": 0.038,
    "recompute": 0.048,
}  # one H200, M 8192, D 4096, V 131072, bfloat16
GPU_BYTES = 5e8
ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative and norm-wise, of loss and gradients against float64
GROWS = (
    "ours, in_forward",
    "ours, recompute",
    "matmul + torch cross_entropy, compiled",
    "matmul + Megatron cross-entropy",
)


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
    clock = CpuClock()
    step(method, case)
    return clock()


def measure_memory(method: Method, case: Case, passes: int = 2) -> int:
    """Peak bytes beyond inputs and gradients; the least of the passes."""
    gradients = sum(x.numel() * x.element_size() for x in (case.hidden, case.weight))
    peaks = []
    for _ in range(passes):
        if case.hidden.is_cuda:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(method, case)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        else:
            peak = PeakMemory()
            kept = step(method, case)
            peaks.append(peak())
            del kept
    return max(0, min(peaks) - gradients)


def _start(device: str, chosen: Sequence[Method]) -> None:
    """Memory that is counted as it is taken, and a group of one for Megatron."""
    if device == "cpu":
        return_freed_memory()
    if any("Megatron" in method.name for method in chosen):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells of each fallback for Transformer Engine; none matters here
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel()


def measure(
    rank: int, tokens: int, vocab: int, size: int, dtype: torch.dtype, repeats: int, budget: int | None, device: str
) -> tuple[dict[str, Figures], float]:
    """Every method, and the TFLOP/s of a matrix product; repeats are interleaved, so that a busy moment hits all alike."""
    chosen = methods(device, budget)
    _start(device, chosen)
    case = make_case(tokens, vocab, size, dtype, device)
    errors = {m.name: check_result(m, case) for m in chosen}  # compiles, too
    case = case._replace(truths={})
    memory = {m.name: measure_memory(m, case) for m in chosen}
    if device == "cpu":
        keep_freed_memory()
    times: dict[str, list[float]] = {m.name: [] for m in chosen}
    with short_collections():
        for _ in range(repeats):
            for m in chosen:
                times[m.name].append(time_once(m, case))
    figures = {m.name: Figures(Seconds.of(times[m.name]), memory[m.name], errors[m.name]) for m in chosen}
    return figures, matmul_rate(device, dtype)


def measure_growth(rank: int, sizes: dict[str, list[tuple[int, int, int]]], dtype: torch.dtype, device: str) -> Growth:
    """Seconds of a few methods as T, V or D doubles."""
    found: Growth = {}
    chosen = [m for m in methods(device, 1 << 24 if device == "cpu" else None) if m.name in GROWS]
    _start(device, chosen)
    for axis, shapes in sizes.items():
        lines: dict[str, dict[int, float]] = {m.name: {} for m in chosen}
        for shape in shapes:
            case = make_case(*shape, dtype, device, truths=False)
            for m in chosen:
                time_once(m, case)
                lines[m.name][shape["TVD".index(axis)]] = min(time_once(m, case) for _ in range(2))
        found[axis] = lines
    return found


def best_peer(results: dict[str, Figures], chosen: Sequence[Method], objective: Objective) -> tuple[float, int]:
    """The least seconds and the least bytes of the peers with this objective."""
    peers = [results[m.name] for m in chosen if m.kind == "peer" and m.objective is objective]
    return min(p.seconds.least for p in peers), max(1, min(p.bytes for p in peers))


def missed(results: dict[str, Figures], chosen: Sequence[Method], device: str) -> list[str]:
    """The targets that were not met."""
    lines = []
    for m in chosen:
        mine, mode = results[m.name], m.name.removeprefix("ours, ")
        least_time, least_bytes = best_peer(results, chosen, m.objective)
        if device == "cuda" and mode in GPU_SECONDS:
            if mine.seconds.least > GPU_SECONDS[mode]:
                lines.append(f"{m.name} takes {1e3 * mine.seconds.least:.1f} ms, over {1e3 * GPU_SECONDS[mode]:.0f}")
            if m.kind != "information" and mine.bytes > GPU_BYTES:
                lines.append(f"{m.name} takes {mine.bytes / 1e9:.2f} GB beyond the gradients, over {GPU_BYTES / 1e9}")
        if device == "cpu" and m.kind in TIME:
            time_ratio, memory_ratio = mine.seconds.least / least_time, mine.bytes / least_bytes
            if time_ratio > TIME[m.kind]:
                lines.append(f"{m.name} takes {time_ratio:.2f} x the time of the fastest peer, over {TIME[m.kind]}")
            if memory_ratio > MEMORY:
                lines.append(f"{m.name} takes {memory_ratio:.2f} x the memory of the frugalest peer, over {MEMORY}")
    return lines


def table(
    results: dict[str, Figures], chosen: Sequence[Method], objective: Objective, title: str, flops: float
) -> Table:
    best = best_peer(results, chosen, objective)
    made = Table(title=title)
    made.add_column("method", no_wrap=True)
    for column in ("s", "/ fastest peer", "TFLOP/s", "extra MB", "/ frugalest peer", "errors: loss, hidden, weight"):
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
    parser.add_argument(
        "--budget", type=int, help="bytes; default: 1/6 of the float32 logits, on a GPU the library's own"
    )
    parser.add_argument("--repeats", type=int, default=5)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    gpu = options.device == "cuda"
    tokens, vocab = options.tokens or (8192 if gpu else 2048), options.vocab or (131072 if gpu else 32768)
    size, name = options.hidden or (4096 if gpu else 512), options.dtype or ("bfloat16" if gpu else "float32")
    if min(tokens, vocab, size, options.repeats) < 1 or (options.budget is not None and options.budget < 1):
        parser.error("sizes must be positive")
    dtype = getattr(torch, name)
    budget = options.budget if options.budget is not None or gpu else max(tokens * vocab * 4 // 6, 1 << 16)
    ((results, rate),) = run_ranks(
        1, measure, tokens, vocab, size, dtype, options.repeats, budget, options.device, timeout=3600.0
    )
    growth = None
    if options.growth:
        halves = {
            "T": [(tokens // k, vocab, size) for k in (4, 2, 1)],
            "V": [(tokens, vocab // k, size) for k in (4, 2, 1)],
            "D": [(tokens, vocab, size // k) for k in (4, 2, 1)],
        }
        (growth,) = run_ranks(1, measure_growth, halves, dtype, options.device, timeout=3600.0)
    chosen, flops = methods(options.device, budget), tokens * vocab * size
    clock = "seconds" if gpu else "CPU-seconds, one thread"
    bars = {
        clock: {m.name: results[m.name].seconds.least for m in chosen},
        "MB beyond inputs and gradients": {m.name: results[m.name].bytes / 1e6 for m in chosen},
    }
    return report(
        options,
        {"T": tokens, "V": vocab, "D": size, "dtype": name, "budget": budget, "device": options.device},
        [
            table(
                results, chosen, objective, f"the LM head, {what}, forward + backward: {clock}, least (median)", flops
            )
            for objective, what in ((weighted, "a weight per token"), (grpo, "the whole GRPO loss"))
        ],
        {name: asdict(row) for name, row in results.items()},
        missed(results, chosen, options.device),
        bars,
        growth,
        {"matmul TFLOP/s": rate},
    )


if __name__ == "__main__":
    sys.exit(main())
