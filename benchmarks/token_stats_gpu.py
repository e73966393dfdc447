"""Token statistics on a card: ours beside the peers that are installed at TP 1, and the passes of one shard of TP 8.

Times are the card's own (CUDA events, with the work queued ahead of it, so that launches do not count); the logits are filled
afresh before each call, which also empties the cache. `python -m benchmarks.token_stats --device cuda`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import Seconds
from benchmarks.peers import join_megatron, results_of
from benchmarks.report import Growth, copy_bandwidth, report
from benchmarks.token_stats_gpu_methods import ENTROPY, OURS, RANKS, SHARD, Case, Method, make_case, methods, shard
from parallel_rl.vocab.backends.choice import Backend

BANDWIDTH = 0.85  # of the measured copy
MAX_EXTRA = 0.1  # bytes per logit in place
ENTROPY_COST = 1.05
H200_SECONDS = {OURS: (0.58e-3, 1.73e-3), SHARD: (0.075e-3, 0.22e-3)}  # forward, both: T 8192, V 128256, bfloat16
ERRORS = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1e-4, 4e-3)}  # log-prob (nats), gradient (relative)
CHECKED = 64  # rows at either end that are compared with float64


@dataclass(frozen=True)
class Figures:
    """Seconds of the card; peak bytes per logit beyond the logits; bandwidth is 2 (forward) or 6 bytes a bfloat16 logit."""

    forward: Seconds
    both: Seconds
    forward_bytes: float
    both_bytes: float
    forward_bandwidth: float
    both_bandwidth: float


def check_result(method: Method, case: Case, work: Tensor) -> None:
    """Compares the rows at either end with float64.

    Raises:
        RuntimeError: the method is wrong, so that its time says nothing.
    """
    work.copy_(case.logits)
    forward, backward = method.start(work, case)
    outputs = forward()
    gradient = backward(outputs)
    dtype = case.logits.dtype
    logprob_limit, gradient_limit = ERRORS[torch.bfloat16 if method.bfloat16_gradient else dtype]
    if method.bfloat16_logprobs and dtype == torch.bfloat16:
        logprob_limit = 0.1
    for rows in (slice(0, CHECKED), slice(-CHECKED, None)):
        z = case.logits[rows].double().requires_grad_()
        log_p = torch.log_softmax(z, -1)
        want = [log_p.gather(1, case.targets[rows, None])[:, 0], -(log_p.exp() * log_p).sum(1)][: len(outputs)]
        (truth,) = torch.autograd.grad(want, z, [g[rows].double() for g in case.upstream[: len(outputs)]])
        errors = [(x[rows].double() - y).abs().max().item() for x, y in zip(outputs, want, strict=True)]
        relative = ((gradient[rows].double() - truth).norm() / truth.norm()).item()
        if not (max(errors) <= logprob_limit and relative <= gradient_limit):
            raise RuntimeError(f"{method.name} is wrong: errors {max(errors):.1e} nats, {relative:.1e} of the gradient")


class _Marks:
    """Moments on the card's own clock; on a CPU the process's."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.marks: list[torch.cuda.Event] = []
        self.times: list[float] = []

    def __call__(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Since the first mark."""
        if not self.cuda:
            return [t - self.times[0] for t in self.times[1:]]
        torch.cuda.synchronize()
        return [self.marks[0].elapsed_time(mark) / 1e3 for mark in self.marks[1:]]


def time_once(method: Method, case: Case, work: Tensor, device: str) -> tuple[float, float]:
    """Seconds of (forward, forward + backward)."""
    work.copy_(case.logits)
    forward, backward = method.start(work, case)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)  # some 2 ms, in which the host queues what follows
    mark = _Marks(device)
    mark()
    outputs = forward()
    mark()
    backward(outputs)
    mark()
    once = mark.seconds()
    return once[0], once[1]


def measure_memory(method: Method, case: Case, work: Tensor, device: str) -> tuple[float, float]:
    """Peak bytes per logit beyond the logits, of (forward, forward + backward); nothing on a CPU."""
    if device != "cuda":
        return 0.0, 0.0
    work.copy_(case.logits)
    forward, backward = method.start(work, case)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = forward()
    first = torch.cuda.max_memory_allocated() - before
    backward(outputs)
    return first / work.numel(), (torch.cuda.max_memory_allocated() - before) / work.numel()


def measure(chosen: list[Method], case: Case, repeats: int, device: str, checked: bool = True) -> dict[str, Figures]:
    """Measure every method, of those that are checked the ones that pass; repeats are interleaved."""
    work = torch.empty_like(case.logits)
    if checked:
        right = results_of(chosen, lambda method: check_result(method, case, work), device)
        chosen = [method for method in chosen if method.name in right]
    for method in chosen:
        time_once(method, case, work, device)  # what is compiled, is compiled
    memory = {m.name: measure_memory(m, case, work, device) for m in chosen}
    times: dict[str, list[tuple[float, float]]] = {m.name: [] for m in chosen}
    for _ in range(repeats):
        for m in chosen:
            times[m.name].append(time_once(m, case, work, device))
    results = {}
    size = work.numel() * work.element_size()
    for name, pairs in times.items():
        forward, both = (Seconds.of(t) for t in zip(*pairs, strict=True))
        bandwidths = size / forward.median / 1e9, 3 * size / both.median / 1e9
        results[name] = Figures(forward, both, *memory[name], *bandwidths)
    return results


def missed(results: dict[str, Figures], chosen: list[Method], copy: float, card: str, is_the_shape: bool) -> list[str]:
    """List the missed figures; those in ms are of one card and one shape."""
    lines = []
    for m in chosen:
        theirs = results[m.name]
        if m.kind == "ours":
            for what, limit in zip(("forward", "both"), H200_SECONDS.get(m.name, ()), strict=False):
                took = getattr(theirs, what).median
                if "H200" in card and is_the_shape and took > limit:
                    lines.append(f"{m.name} takes {1e3 * took:.3f} ms ({what}), over {1e3 * limit:g}")
            for what in ("forward", "both"):
                share = getattr(theirs, f"{what}_bandwidth") / copy
                if m.name == OURS and share < BANDWIDTH:
                    lines.append(f"{m.name} reaches {share:.0%} of the copy bandwidth ({what}), below {BANDWIDTH:.0%}")
            if max(theirs.forward_bytes, theirs.both_bytes) > MAX_EXTRA and m.name != SHARD:
                lines.append(f"{m.name} takes {theirs.both_bytes:.2f} bytes per logit, over {MAX_EXTRA}")
        else:
            for what in ("forward", "both"):
                ratio = getattr(theirs, what).median / getattr(results[OURS], what).median
                if ratio <= 1:
                    lines.append(f"{m.name} takes {ratio:.2f} x our time ({what})")
    for what in ("forward", "both"):
        ratio = getattr(results[ENTROPY], what).median / getattr(results[OURS], what).median
        if ratio > ENTROPY_COST:
            lines.append(f"the entropy costs {ratio - 1:.0%} ({what}), over {ENTROPY_COST - 1:.0%}")
    return lines


def table(results: dict[str, Figures], copy: float, title: str) -> Table:
    made = Table("method", title=title)
    for column in ("forward ms", "fwd + bwd ms", "theirs / ours", "of the copy", "extra B/logit"):
        made.add_column(column, justify="right")
    ours = results[OURS]
    for name, row in results.items():
        made.add_row(
            name,
            f"{1e3 * row.forward.least:.3f} ({1e3 * row.forward.median:.3f})",
            f"{1e3 * row.both.least:.3f} ({1e3 * row.both.median:.3f})",
            f"{row.forward.median / ours.forward.median:.2f} / {row.both.median / ours.both.median:.2f}",
            f"{row.forward_bandwidth / copy:.0%} / {row.both_bandwidth / copy:.0%}",
            f"{row.forward_bytes:.2f} / {row.both_bytes:.2f}",
        )
    return made


def run(
    options: argparse.Namespace,
    tokens: int,
    vocab: int,
    repeats: int,
    device: str = "cuda",
    backend: Backend = "auto",
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
) -> int:
    """Measures, prints and writes; the exit status."""
    card = torch.cuda.get_device_name() if device == "cuda" else device
    copy = copy_bandwidth(device, 1 << (31 if device == "cuda" else 20))
    chosen = methods(device, backend)
    if any("Megatron" in m.name for m in chosen):
        join_megatron()
    tables, results, lines = [], {}, []
    of_shard = shard(backend)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        figures = measure(chosen, make_case(tokens, vocab, dtype, device), repeats, device)
        figures |= measure([of_shard], make_case(tokens, vocab // RANKS, dtype, device), repeats, device, checked=False)
        is_the_shape = (tokens, vocab, dtype) == (8192, 128256, torch.bfloat16)
        measured = [m for m in [*chosen, of_shard] if m.name in figures]
        lines += [f"{name}: {x}" for x in missed(figures, measured, copy, card, is_the_shape)]
        tables.append(table(figures, copy, f"{name} on {card}: least (median)"))
        results[name] = {method: asdict(row) for method, row in figures.items()}
    bars = {
        f"{name}, forward + backward, ms": {method: 1e3 * row["both"].median for method, row in rows.items()}
        for name, rows in results.items()
    }
    sizes = {"tokens": tokens, "vocab": vocab, "repeats": repeats, "card": card}
    growth = measure_growth(tokens, vocab, dtypes[0], repeats, device, backend) if options.growth else None
    return report(options, sizes, tables, results, lines, bars, growth, {"copy GB/s": copy})


def measure_growth(tokens: int, vocab: int, dtype: torch.dtype, repeats: int, device: str, backend: Backend) -> Growth:
    """Forward + backward with entropy, by tokens, vocabulary and ranks that share it."""
    entropy = next(m for m in methods(device, backend) if m.name == ENTROPY)
    of_shard = shard(backend)

    def seconds(method: Method, tokens: int, vocab: int) -> float:
        case = make_case(tokens, vocab, dtype, device)
        return measure([method], case, repeats, device, checked=False)[method.name].both.median

    return {
        "T": {ENTROPY: {n: seconds(entropy, n, vocab) for n in (tokens // 4, tokens // 2, tokens)}},
        "V": {ENTROPY: {n: seconds(entropy, tokens, n) for n in (vocab // 4, vocab // 2, vocab)}},
        "TP": {"ours + entropy, a shard": {n: seconds(of_shard, tokens, vocab // n) for n in (1, 2, 4, 8)}},
    }
