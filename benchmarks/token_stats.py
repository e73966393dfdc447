"""Token statistics from vocab-parallel logits: ours beside megatron-core's cross-entropies and a gathered log-softmax.

Every method gets the same logits, targets and per-token upstream gradient (what a policy loss gives), logits that it
may overwrite if it does so, and is checked against float64 before it is timed. `python -m benchmarks.token_stats --help`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks import token_stats_gpu
from benchmarks.common import (
    CpuClock,
    PeakMemory,
    Seconds,
    keep_freed_memory,
    return_freed_memory,
    run_ranks,
    short_collections,
)
from benchmarks.peers import MEGATRON_FUSED, join_megatron
from benchmarks.report import Growth, add_report_options, copy_bandwidth, matmul_rate, report
from benchmarks.token_stats_methods import GATHERED, OURS, Method, methods
from benchmarks.vocab_case import Case, make_case, reference_gradient

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_EXTRA = 0.1  # bytes of extra memory per local logit that ours may take in place
# Largest errors against float64: of a log-prob (nats), and of the gradient (relative, norm-wise) by the dtype it comes in.
LOGPROB_ERROR, BFLOAT16_LOGPROB_ERROR = 1e-4, 0.1
GRADIENT_ERROR = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


@dataclass(frozen=True)
class Figures:
    """Measurements of one method on one rank; bytes are per local logit, beyond the logits."""

    forward: Seconds
    both: Seconds
    forward_bytes: float
    both_bytes: float
    logprob_error: float
    gradient_error: float


def _leaf(work: Tensor, case: Case) -> Tensor:
    """Fresh logits in the buffer that every method shares, as an output of the model would arrive."""
    work.copy_(case.logits)
    return work.detach().requires_grad_()


def _backward(outputs: tuple[Tensor, ...], logits: Tensor, case: Case) -> Tensor:
    (gradient,) = torch.autograd.grad(outputs, logits, (case.upstream, case.upstream_entropy)[: len(outputs)])
    return gradient


def check_result(method: Method, case: Case, work: Tensor) -> tuple[float, float]:
    """(largest error of a log-prob, relative error of the gradient) against float64.

    Raises:
        RuntimeError: the method is wrong, so that its time says nothing.
    """
    logits = _leaf(work, case)
    outputs = method.forward(logits, case.targets)
    references = (case.logprobs, case.entropy)
    logprob_error = max((x.double() - y).abs().max().item() for x, y in zip(outputs, references, strict=False))
    gradient = _backward(outputs, logits, case)
    squares = torch.zeros(2, dtype=torch.float64)
    for rows, reference in reference_gradient(case, entropy=len(outputs) == 2):
        squares += torch.stack([(gradient[rows].double() - reference).square().sum(), reference.square().sum()])
    dist.all_reduce(squares)
    gradient_error = (squares[0] / squares[1]).sqrt().item()
    limit = GRADIENT_ERROR[torch.bfloat16 if method.bfloat16_gradient else case.logits.dtype]
    rounded = method.bfloat16_logprobs and case.logits.dtype == torch.bfloat16
    logprob_limit = BFLOAT16_LOGPROB_ERROR if rounded else LOGPROB_ERROR
    if not (logprob_error <= logprob_limit and gradient_error <= limit):
        raise RuntimeError(
            f"{method.name} is wrong: errors {logprob_error:.1e} nats, {gradient_error:.1e} of the gradient"
        )
    return logprob_error, gradient_error


def time_once(method: Method, case: Case, work: Tensor) -> tuple[float, float]:
    """CPU-seconds of (forward, forward + backward)."""
    logits = _leaf(work, case)
    dist.barrier()
    clock = CpuClock()
    outputs = method.forward(logits, case.targets)
    forward = clock()
    _backward(outputs, logits, case)
    return forward, clock()


def measure_memory(method: Method, case: Case, work: Tensor, passes: int = 2) -> tuple[float, float]:
    """Peak bytes per local logit beyond the logits: (forward, forward + backward).

    The least of the passes: the first one brings in what a method loads once, pages of libraries among it.
    """
    peaks = []
    for _ in range(passes):
        logits = _leaf(work, case)
        dist.barrier()
        peak = PeakMemory()
        outputs = method.forward(logits, case.targets)
        forward = peak()
        gradient = _backward(outputs, logits, case)
        peaks.append((forward, peak()))
        del outputs, gradient
    forward, both = (min(x) for x in zip(*peaks, strict=True))
    return forward / work.numel(), both / work.numel()


def measure(
    rank: int, tokens: int, vocab: int, tp: int, repeats: int, only: tuple[str, ...] | None = None
) -> dict[str, dict[str, Figures]]:
    """Measure every dtype and method on one rank. Repeats are interleaved, so that a busy moment hits all methods alike."""
    return_freed_memory()  # before any large block: the allocator would reuse what it has once kept, unseen
    join_megatron(tp)
    cases = {name: make_case(rank, tokens, vocab, tp, dtype) for name, dtype in DTYPES.items()}
    works = {name: torch.empty_like(case.logits) for name, case in cases.items()}
    keys = [(name, method) for name in DTYPES for method in methods(tp) if only is None or method.name in only]
    errors = {(name, m.name): check_result(m, cases[name], works[name]) for name, m in keys}  # compiles, too
    memory = {(name, m.name): measure_memory(m, cases[name], works[name]) for name, m in keys}
    times: dict[tuple[str, str], list[tuple[float, float]]] = {(name, m.name): [] for name, m in keys}
    keep_freed_memory()
    with short_collections():
        for _ in range(repeats):
            for name, m in keys:
                times[name, m.name].append(time_once(m, cases[name], works[name]))
    results: dict[str, dict[str, Figures]] = {name: {} for name in DTYPES}
    for name, m in keys:
        key = name, m.name
        forward, both = (Seconds.of(t) for t in zip(*times[key], strict=True))
        results[name][m.name] = Figures(forward, both, *memory[key], *errors[key])
    return results


def over_ranks(ranks: list[Figures]) -> Figures:
    """Seconds of the average process, memory and errors of the worst."""
    return Figures(
        Seconds.mean([r.forward for r in ranks]),
        Seconds.mean([r.both for r in ranks]),
        *(
            max(getattr(r, f) for r in ranks)
            for f in ("forward_bytes", "both_bytes", "logprob_error", "gradient_error")
        ),
    )


def missed(results: dict[str, dict[str, Figures]]) -> list[str]:
    """List the missed figures: ours ahead of every peer on both passes, and hardly any memory in place."""
    lines = []
    for dtype, figures in results.items():
        ours = figures[OURS]
        for method in methods(1):
            if method.name not in figures:
                continue
            theirs = figures[method.name]
            if method.kind == "peer":
                for what in ("forward", "both"):
                    ratio = getattr(theirs, what).least / getattr(ours, what).least
                    if ratio <= 1:
                        lines.append(f"{dtype}: {method.name} takes {ratio:.2f} x our CPU time ({what})")
            elif method.kind == "ours" and max(theirs.forward_bytes, theirs.both_bytes) > MAX_EXTRA:
                lines.append(f"{dtype}: {method.name} takes {theirs.both_bytes:.2f} bytes per logit, over {MAX_EXTRA}")
    return lines


def table(dtype: str, figures: dict[str, Figures], logits: int, copy: float) -> Table:
    """Bandwidth is what the method would need at least, a read forward and a read and a write backward, over its time."""
    columns = ("forward s", "fwd + bwd s", "peer / ours", "% of copy", "extra B/logit", "log-prob err", "gradient err")
    traffic = logits * DTYPES[dtype].itemsize / 1e9
    made = Table(title=f"{dtype}: CPU-seconds of a process, least (median)")
    made.add_column("method", no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right")
    ours = figures[OURS]
    for name, row in figures.items():
        made.add_row(
            name,
            f"{row.forward.least:.3f} ({row.forward.median:.3f})",
            f"{row.both.least:.3f} ({row.both.median:.3f})",
            f"{row.forward.least / ours.forward.least:.2f} / {row.both.least / ours.both.least:.2f}",
            f"{traffic / row.forward.least / copy:.0%} / {3 * traffic / row.both.least / copy:.0%}",
            f"{row.forward_bytes:.2f} / {row.both_bytes:.2f}",
            f"{row.logprob_error:.1e}",
            f"{row.gradient_error:.1e}",
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_stats", description=__doc__)
    on_card = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_card else "cpu")
    parser.add_argument("--tokens", type=int, help="default: 2048, on a card 8192")
    parser.add_argument("--vocab", type=int, help="default: 32768, on a card 128256")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel processes, one thread each (not on a card)")
    parser.add_argument("--repeats", type=int, default=9)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not on_card:
        parser.error("--device cuda: torch sees no card")
    tokens, vocab = (8192, 128256) if options.device == "cuda" else (2048, 32768)
    options.tokens = tokens if options.tokens is None else options.tokens
    options.vocab = vocab if options.vocab is None else options.vocab
    if min(options.tokens, options.vocab, options.tp, options.repeats) < 1 or options.vocab % options.tp:
        parser.error("sizes must be positive, and --vocab must be divisible by --tp")
    if options.device == "cuda":
        return token_stats_gpu.run(options, options.tokens, options.vocab, options.repeats)
    if find_spec("megatron") is None:
        parser.error("the peers are missing: pip install -r benchmarks/peers.txt")
    size = (options.tokens, options.vocab, options.tp)
    results = run(*size, options.repeats)
    ceilings = {
        "copy GB/s": copy_bandwidth("cpu"),
        **{f"{name} matmul TFLOP/s": matmul_rate("cpu", dtype) for name, dtype in DTYPES.items()},
    }
    bars = {
        f"{dtype}: forward + backward, CPU-seconds": {m: r.both.least for m, r in rows.items()}
        for dtype, rows in results.items()
    }
    bars |= {
        f"{dtype}: extra bytes per logit": {m: r.both_bytes for m, r in rows.items()} for dtype, rows in results.items()
    }
    return report(
        options,
        {"T": size[0], "V": size[1], "TP": size[2], "repeats": options.repeats},
        [
            table(dtype, figures, size[0] * size[1] // size[2], ceilings["copy GB/s"])
            for dtype, figures in results.items()
        ],
        {dtype: {name: asdict(row) for name, row in rows.items()} for dtype, rows in results.items()},
        missed(results),
        bars,
        measure_growth(*size, options.repeats) if options.growth else None,
        ceilings,
    )


def run(
    tokens: int, vocab: int, tp: int, repeats: int, only: tuple[str, ...] | None = None
) -> dict[str, dict[str, Figures]]:
    """dtype → method → figures, on `tp` real processes."""
    ranks = run_ranks(tp, measure, tokens, vocab, tp, repeats, only, timeout=3600.0)
    return {d: {m: over_ranks([rank[d][m] for rank in ranks]) for m in rows} for d, rows in ranks[0].items()}


def measure_growth(tokens: int, vocab: int, tp: int, repeats: int) -> Growth:
    """Forward + backward in bfloat16, by tokens, vocabulary and tensor-parallel processes: ours, and the best peer."""
    names = (OURS, MEGATRON_FUSED, GATHERED)
    axes = {
        "T": {n: (n, vocab, tp) for n in (tokens // 2, tokens, 2 * tokens)},
        "V": {n: (tokens, n, tp) for n in (vocab // 2, vocab, 2 * vocab)},
        "TP": {n: (tokens, vocab, n) for n in (1, 2, 4)},
    }
    seen: dict[tuple[int, int, int], dict[str, Figures]] = {}
    growth: Growth = {}
    for axis, points in axes.items():
        growth[axis] = {name: {} for name in names}
        for n, point in points.items():
            if point not in seen:
                seen[point] = run(*point, repeats, names)["bfloat16"]
            for name in names:
                growth[axis][name][n] = seen[point][name].both.least
    return growth


if __name__ == "__main__":
    sys.exit(main())
