"""Top-k and top-p log-probs from vocab-parallel logits: ours beside the two ways that bring rows together and sort them.

"gather" gives every rank the whole vocabulary; "exchange" gives each rank whole rows of its part of the tokens (two
all-to-alls, as NeMo-RL has it). Both then sort. Every method gets the same logits, targets and upstream gradient, and is
checked against float64 before it is timed. Draws and top-k values from shards are timed beside them.
`python -m benchmarks.truncation --help`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
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
from benchmarks.report import Growth, add_report_options, report
from benchmarks.truncation_case import RULES, Case, make_case
from benchmarks.truncation_methods import METHODS, OURS, Method, make_draws

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# bytes of extra memory per local logit that ours may take in place: top-p copies a hundredth of the logits, once or twice
MAX_EXTRA, MAX_EXTRA_TOP_P = 0.1, 0.2
LOGPROB_ERROR = 1e-4  # nats
GRADIENT_ERROR = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
# The sum of sorted float32 probabilities is off by enough to keep a few tokens more or fewer.
PEER_ERROR = 1e-2


@dataclass(frozen=True)
class Figures:
    """Measurements of one method on one rank; bytes are per local logit, beyond the logits."""

    forward: Seconds
    both: Seconds
    bytes: float
    logprob_error: float
    gradient_error: float


Results = dict[str, dict[str, dict[str, Figures]]]  # dtype → rule → method


def _leaf(work: Tensor, case: Case) -> Tensor:
    """Fresh logits in the buffer that every method shares, as an output of the model would arrive."""
    work.copy_(case.logits)
    return work.detach().requires_grad_()


def _backward(logprobs: Tensor, logits: Tensor, case: Case) -> Tensor:
    (gradient,) = torch.autograd.grad(torch.where(logprobs > -torch.inf, logprobs, 0), logits, case.upstream)
    return gradient


def check_result(method: Method, name: str, case: Case, work: Tensor) -> tuple[float, float]:
    """(largest error of a log-prob, relative error of the gradient) against float64.

    Raises:
        RuntimeError: the method is wrong, so that its time says nothing.
    """
    logits = _leaf(work, case)
    logprobs = method.run(logits, case.targets, **RULES[name])
    want, gradient = case.truth[name]
    inside = want > -torch.inf
    found = _backward(logprobs, logits, case).double()
    squares = torch.stack([(found - gradient).square().sum(), gradient.double().square().sum()])
    dist.all_reduce(squares)
    both = inside & (logprobs > -torch.inf)
    error = (logprobs.double() - want)[both].abs().max().item()
    of_gradient = (squares[0] / squares[1]).sqrt().item()
    peer = method.kind == "peer"
    same = peer or torch.equal(logprobs > -torch.inf, inside)
    limits = (PEER_ERROR, PEER_ERROR) if peer else (LOGPROB_ERROR, GRADIENT_ERROR[case.logits.dtype])
    if not (same and error <= limits[0] and of_gradient <= limits[1]):
        raise RuntimeError(f"{method.name}, {name} is wrong: {error:.1e} nats, gradient {of_gradient:.1e}, kept {same}")
    return error, of_gradient


def time_once(method: Method, name: str, case: Case, work: Tensor) -> tuple[float, float]:
    """CPU-seconds of (forward, forward + backward)."""
    logits = _leaf(work, case)
    dist.barrier()
    clock = CpuClock()
    logprobs = method.run(logits, case.targets, **RULES[name])
    forward = clock()
    _backward(logprobs, logits, case)
    return forward, clock()


def measure_memory(method: Method, name: str, case: Case, work: Tensor, passes: int = 2) -> float:
    """Peak bytes per local logit beyond the logits, forward + backward: the least of the passes."""
    peaks = []
    for _ in range(passes):
        logits = _leaf(work, case)
        dist.barrier()
        peak = PeakMemory()
        gradient = _backward(method.run(logits, case.targets, **RULES[name]), logits, case)
        peaks.append(peak())
        del gradient
    return min(peaks) / work.numel()


def measure(
    rank: int, tokens: int, vocab: int, tp: int, repeats: int, names: tuple[str, ...], whole: bool
) -> tuple[Results, dict[str, Seconds]]:
    """Measure on one rank, and the seconds of the draws. Repeats are interleaved."""
    return_freed_memory()
    dtypes = DTYPES if whole else {"float32": torch.float32}
    rules = list(RULES) if whole else list(RULES)[:1]
    methods = [m for m in METHODS if m.name in names]
    cases = {name: make_case(rank, tokens, vocab, tp, dtype) for name, dtype in dtypes.items()}
    works = {name: torch.empty_like(case.logits) for name, case in cases.items()}
    keys = [(dtype, rule, method) for dtype in dtypes for rule in rules for method in methods]
    errors = {(d, r, m.name): check_result(m, r, cases[d], works[d]) for d, r, m in keys}  # compiles, too
    cases = {name: case._replace(truth={}) for name, case in cases.items()}
    memory = {(d, r, m.name): measure_memory(m, r, cases[d], works[d]) for d, r, m in keys}
    draws = make_draws(cases["float32"]) if whole else {}
    times: dict[tuple[str, str, str], list[tuple[float, float]]] = {(d, r, m.name): [] for d, r, m in keys}
    of_draws: dict[str, list[float]] = {name: [] for name in draws}
    keep_freed_memory()
    with short_collections():
        for _ in range(repeats):
            for d, r, m in keys:
                times[d, r, m.name].append(time_once(m, r, cases[d], works[d]))
            for name, draw in draws.items():
                dist.barrier()
                clock = CpuClock()
                draw()
                of_draws[name].append(clock())
    results: Results = {d: {r: {} for r in rules} for d in dtypes}
    for key, measured in times.items():
        forward, both = (Seconds.of(t) for t in zip(*measured, strict=True))
        results[key[0]][key[1]][key[2]] = Figures(forward, both, memory[key], *errors[key])
    return results, {name: Seconds.of(t) for name, t in of_draws.items()}


def over_ranks(ranks: list[Figures]) -> Figures:
    """Seconds of the average process, memory and errors of the worst."""
    worst = (max(getattr(r, f) for r in ranks) for f in ("bytes", "logprob_error", "gradient_error"))
    return Figures(Seconds.mean([r.forward for r in ranks]), Seconds.mean([r.both for r in ranks]), *worst)


def run(
    tokens: int, vocab: int, tp: int, repeats: int, names: tuple[str, ...], whole: bool = True
) -> tuple[Results, dict[str, Seconds]]:
    """`measure` on `tp` real processes."""
    ranks = run_ranks(tp, measure, tokens, vocab, tp, repeats, names, whole, timeout=3600.0)
    first, draws = ranks[0]
    results = {
        d: {r: {m: over_ranks([rank[0][d][r][m] for rank in ranks]) for m in first[d][r]} for r in first[d]}
        for d in first
    }
    return results, {name: Seconds.mean([rank[1][name] for rank in ranks]) for name in draws}


def missed(results: Results) -> list[str]:
    """List the missed figures: ours ahead of every peer on both passes, and hardly any memory in place."""
    lines = []
    for dtype, rules in results.items():
        for rule, figures in rules.items():
            ours = figures[OURS]
            limit = MAX_EXTRA_TOP_P if "top_p" in RULES[rule] else MAX_EXTRA
            if ours.bytes > limit:
                lines.append(f"{dtype}, {rule}: ours takes {ours.bytes:.2f} bytes per logit in place, over {limit}")
            for method in METHODS:
                if method.kind != "peer" or method.name not in figures:
                    continue
                for what in ("forward", "both"):
                    ratio = getattr(figures[method.name], what).least / getattr(ours, what).least
                    if ratio <= 1:
                        lines.append(f"{dtype}, {rule}: {method.name} takes {ratio:.2f} x our CPU time ({what})")
    return lines


def table(dtype: str, rules: dict[str, dict[str, Figures]]) -> Table:
    made = Table("rule", "method", title=f"{dtype}: CPU-seconds of a process, least (median)")
    for column in ("forward s", "fwd + bwd s", "method / ours", "extra B/logit", "log-prob err", "gradient err"):
        made.add_column(column, justify="right")
    for rule, figures in rules.items():
        ours = figures[OURS]
        for name, row in figures.items():
            made.add_row(
                rule,
                name,
                f"{row.forward.least:.3f} ({row.forward.median:.3f})",
                f"{row.both.least:.3f} ({row.both.median:.3f})",
                f"{row.forward.least / ours.forward.least:.2f} / {row.both.least / ours.both.least:.2f}",
                f"{row.bytes:.2f}",
                f"{row.logprob_error:.1e}",
                f"{row.gradient_error:.1e}",
            )
    return made


def draws_table(draws: dict[str, Seconds]) -> Table:
    made = Table("float32, without gradient", title="CPU-seconds of a process, least (median)")
    made.add_column("s", justify="right")
    for name, seconds in draws.items():
        made.add_row(name, f"{seconds.least:.3f} ({seconds.median:.3f})")
    return made


def measure_growth(tokens: int, vocab: int, tp: int, repeats: int) -> Growth:
    """Forward + backward of top-p in float32, by tokens, vocabulary and tensor-parallel processes."""
    names = (OURS, "exchange, then sort")
    growth: Growth = {}
    axes = {
        "T": {tokens // 2: (tokens // 2, vocab, tp), tokens: (tokens, vocab, tp), 2 * tokens: (2 * tokens, vocab, tp)},
        "V": {vocab // 2: (tokens, vocab // 2, tp), vocab: (tokens, vocab, tp), 2 * vocab: (tokens, 2 * vocab, tp)},
        "TP": {size: (tokens, vocab, size) for size in (1, 2, 4)},
    }
    seen: dict[tuple[int, int, int], dict[str, Figures]] = {}
    for axis, points in axes.items():
        growth[axis] = {name: {} for name in names}
        for size, point in points.items():
            if point not in seen:
                results, _ = run(*point, repeats, names, whole=False)
                seen[point] = results["float32"]["top-p 0.95"]
            for name in names:
                growth[axis][name][size] = seen[point][name].both.least
    return growth


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truncation", description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel processes, one thread each")
    parser.add_argument("--repeats", type=int, default=3)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    size = (options.tokens, options.vocab, options.tp)
    if min(*size, options.repeats) < 1 or options.vocab % options.tp or options.tokens % options.tp:
        parser.error("sizes must be positive, and --vocab and --tokens must be divisible by --tp")
    if options.vocab < 1000:
        parser.error("--vocab must be at least 1000, the largest top-k here")
    results, draws = run(*size, options.repeats, tuple(m.name for m in METHODS))
    growth = measure_growth(*size, options.repeats) if options.growth else None
    bars = {
        f"{dtype}, {rule}: forward + backward, CPU-seconds": {name: row.both.least for name, row in figures.items()}
        for dtype, rules in results.items()
        for rule, figures in rules.items()
    }
    numbers = {
        d: {r: {m: asdict(row) for m, row in fs.items()} for r, fs in rules.items()} for d, rules in results.items()
    }
    return report(
        options,
        {"T": size[0], "V": size[1], "TP": size[2], "repeats": options.repeats},
        [*(table(dtype, rules) for dtype, rules in results.items()), draws_table(draws)],
        {"statistics": numbers, "draws": {name: s._asdict() for name, s in draws.items()}},
        missed(results),
        bars,
        growth,
    )


if __name__ == "__main__":
    sys.exit(main())
