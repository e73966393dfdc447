"""A whole policy loss (GRPO), forward and backward: beyond its token statistics, by number of sequences, beside plain PyTorch.

Two tables. "sequences": packed rows of one length that hold 1, 16 or 256 sequences, with a small vocabulary so that the loss's
own work shows; beside the time it counts the operators that PyTorch dispatches, which must not grow with the number of
sequences. "whole": a real vocabulary, where the statistics dominate, beside the same loss written in plain PyTorch, eager and
compiled. Results are checked before anything is timed. `python -m benchmarks.losses --help`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import (
    CountOperators,
    CpuClock,
    Seconds,
    keep_freed_memory,
    peak_bytes,
    return_freed_memory,
    short_collections,
)
from benchmarks.losses_case import (
    GRPO,
    LOSSES,
    Call,
    agree,
    make_call,
    make_data,
    make_logits,
    make_statistics,
    plain_grpo,
)
from benchmarks.report import Growth, add_report_options, report
from parallel_rl import PolicyLossFn, count_valid, token_stats

SEQUENCES = (1, 16, 256)
MAX_RATIO = 1.3  # time of a packed row, over that of one sequence of its length
MAX_BEYOND = 0.5e-3  # seconds that GRPO may take beyond the statistics: one H200, 32k tokens in 256 sequences
MAX_EXTRA = 0.1  # bytes a logit in place, of the whole loss
CALLS = 5  # in one measurement: a call takes milliseconds
STATISTICS = "token statistics alone"
OURS, EAGER, COMPILED = "ours, in place", "plain PyTorch, eager", "plain PyTorch, compiled"
NO_ENTROPY = "plain PyTorch, compiled, no entropy"  # it does less: for information


@dataclass(frozen=True)
class Figures:
    """Figures of one number of sequences."""

    sequences: int
    seconds: Seconds  # of one call and its backward
    operators: int


@dataclass(frozen=True)
class Whole:
    """Figures of one method with a real vocabulary."""

    seconds: Seconds
    bytes: float  # a logit, beyond the logits


def _clock(device: str) -> Callable[[], float]:
    """CPU-seconds, or the card's own: it is kept busy while the host queues one call, so that launches do not count."""
    if device == "cpu":
        return CpuClock()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)  # some 20 ms
    start.record()

    def read() -> float:
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    return read


def measure_sequences(tokens: int, vocab: int, repeats: int, device: str) -> dict[str, list[Figures]]:
    """Loss → every number of sequences; repeats are interleaved, so that a busy moment hits all alike."""
    seconds: dict[str, list[Seconds]] = {}
    every: dict[str, list[Call]] = {}
    for name in (STATISTICS, *LOSSES):
        calls = every[name] = []
        for sequences in SEQUENCES:
            data = make_data(tokens, vocab, sequences, device)
            if name == STATISTICS:
                calls.append(make_statistics(data, vocab))
            else:
                calls.append(make_call(LOSSES[name](), data, vocab))
                agree(name, calls[-1](), make_call(LOSSES[name](), data, vocab, packed=False)())
        times: list[list[float]] = [[] for _ in SEQUENCES]
        with short_collections():
            for _ in range(repeats):
                for call, measured in zip(calls, times, strict=True):
                    count = CALLS if device == "cpu" else 1  # a card takes so many launches ahead, no more
                    clock = _clock(device)
                    for _ in range(count):
                        call()
                    measured.append(clock() / count)
        seconds[name] = [Seconds.of(measured) for measured in times]
    # last: code compiled inside a counter stays slower
    operators = {name: [_operators(call) for call in calls] for name, calls in every.items()}
    return {name: [Figures(*x) for x in zip(SEQUENCES, seconds[name], operators[name], strict=True)] for name in every}


def _operators(call: Call) -> int:
    with CountOperators() as counter:
        call()
    return counter.count


def measure_whole(tokens: int, vocab: int, repeats: int, device: str) -> dict[str, Whole]:
    """GRPO on 16 rows with a real vocabulary. Time and memory of forward + backward from logits that may be overwritten."""
    data = make_data(tokens, vocab, 16, device)
    counts, logits = count_valid([data]), make_logits(data, vocab)
    work = torch.empty_like(logits)
    ours, compiled = PolicyLossFn(GRPO, consume_logits=True), torch.compile(plain_grpo)

    def step(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = work.detach().requires_grad_()
        loss = function(leaf)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    methods: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: lambda z: ours(z, data, *counts)[0],
        STATISTICS: lambda z: token_stats(z, data["input_ids"], consume_logits=True).logprobs.sum(),
        EAGER: lambda z: plain_grpo(z, data, counts.toks)[0],
        COMPILED: lambda z: compiled(z, data, counts.toks)[0],
        NO_ENTROPY: lambda z: compiled(z, data, counts.toks, False)[0],
    }
    work.copy_(logits)
    loss, gradient = step(lambda z: plain_grpo(z.double(), data, counts.toks)[0])
    truth = loss, gradient.float()
    bytes_of: dict[str, float] = {}
    if device == "cpu":
        return_freed_memory()
    for name, function in methods.items():
        work.copy_(logits)
        found = step(function)  # compiles, too
        if name != STATISTICS:
            agree(name, found, truth)
        del found
        peaks = []
        for _ in range(2):
            work.copy_(logits)
            peaks.append(peak_bytes(partial(step, function), device))
        bytes_of[name] = min(peaks) / work.numel()
    if device == "cpu":
        keep_freed_memory()
    del truth, gradient
    times: dict[str, list[float]] = {name: [] for name in methods}
    with short_collections():
        for _ in range(repeats):
            for name, function in methods.items():
                work.copy_(logits)
                clock = _clock(device)
                step(function)
                times[name].append(clock())
    return {name: Whole(Seconds.of(times[name]), bytes_of[name]) for name in methods}


def missed(sequences: dict[str, list[Figures]], whole: dict[str, Whole], device: str = "cpu") -> list[str]:
    """List the missed figures."""
    lines = []
    for name, rows in sequences.items():
        for row in rows[1:]:
            ratio = row.seconds.least / rows[0].seconds.least
            if ratio > MAX_RATIO:
                lines.append(f"{name}: {row.sequences} sequences take {ratio:.2f} x the time of one, over {MAX_RATIO}")
            if row.operators > rows[0].operators:
                lines.append(
                    f"{name}: {row.sequences} sequences take {row.operators} operators, one {rows[0].operators}"
                )
    for peer in (EAGER, COMPILED):
        if peer in whole and whole[peer].seconds.least <= whole[OURS].seconds.least:
            lines.append(f"{peer} takes {whole[peer].seconds.least / whole[OURS].seconds.least:.2f} x our time")
    if OURS in whole and whole[OURS].bytes > MAX_EXTRA:
        lines.append(f"{OURS} takes {whole[OURS].bytes:.2f} bytes per logit, over {MAX_EXTRA}")
    if device == "cuda":
        beyond = sequences["GRPO"][-1].seconds.least - sequences[STATISTICS][-1].seconds.least
        if beyond > MAX_BEYOND:
            lines.append(f"GRPO takes {1e3 * beyond:.2f} ms beyond the statistics, over {1e3 * MAX_BEYOND}")
    return lines


def sequences_table(results: dict[str, list[Figures]], unit: str) -> Table:
    made = Table("loss", title=f"packed rows, forward + backward: {unit}-milliseconds, least (median)")
    for column in ("sequences", "ms", "beyond the statistics", "÷ one sequence", "operators"):
        made.add_column(column, justify="right")
    for name, rows in results.items():
        for row, base in zip(rows, results[STATISTICS], strict=True):
            made.add_row(
                name,
                str(row.sequences),
                f"{1e3 * row.seconds.least:.2f} ({1e3 * row.seconds.median:.2f})",
                "" if name == STATISTICS else f"{1e3 * (row.seconds.least - base.seconds.least):.2f}",
                f"{row.seconds.least / rows[0].seconds.least:.2f}",
                str(row.operators),
            )
    return made


def whole_table(whole: dict[str, Whole], unit: str) -> Table:
    made = Table("method", title=f"GRPO with a real vocabulary, forward + backward: {unit}-seconds, least (median)")
    for column in ("s", "÷ ours", "extra B/logit"):
        made.add_column(column, justify="right")
    for name, row in whole.items():
        made.add_row(
            name,
            f"{row.seconds.least:.4f} ({row.seconds.median:.4f})",
            f"{row.seconds.least / whole[OURS].seconds.least:.2f}",
            f"{row.bytes:.2f}",
        )
    return made


def measure_growth(tokens: int, vocab: int, repeats: int, device: str) -> Growth:
    """The whole loss by tokens and by vocabulary."""
    growth: Growth = {}
    for axis, points in {
        "T": {n: (n, vocab) for n in (tokens // 2, tokens, 2 * tokens)},
        "V": {n: (tokens, n) for n in (vocab // 2, vocab, 2 * vocab)},
    }.items():
        growth[axis] = {OURS: {}, EAGER: {}, COMPILED: {}}
        for size, point in points.items():
            found = measure_whole(*point, repeats, device)
            for name in growth[axis]:
                growth[axis][name][size] = found[name].seconds.least
    return growth


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help='of "sequences", a multiple of 256; default: 8192, on a GPU 32768')
    parser.add_argument("--vocab", type=int, default=64, help='of "sequences"')
    parser.add_argument("--whole-tokens", type=int, default=1024, help='of "whole", a multiple of 16; 0 leaves it out')
    parser.add_argument("--whole-vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=20)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    device = options.device
    tokens = options.tokens or (32768 if device == "cuda" else 8192)
    if min(tokens, options.vocab, options.whole_vocab, options.repeats) < 1 or tokens % max(SEQUENCES):
        parser.error(f"sizes must be positive, and --tokens must be divisible by {max(SEQUENCES)}")
    if options.whole_tokens % 16 or options.whole_tokens < 0:
        parser.error("--whole-tokens must be divisible by 16")
    torch.set_num_threads(1)
    sequences = measure_sequences(tokens, options.vocab, options.repeats, device)
    size = options.whole_tokens, options.whole_vocab
    whole = measure_whole(*size, options.repeats, device) if size[0] else {}
    growth = {} if not (options.growth and whole) else measure_growth(*size, options.repeats, device)
    growth |= {
        "sequences": {name: {row.sequences: row.seconds.least for row in rows} for name, rows in sequences.items()}
    }
    unit = "CPU" if device == "cpu" else "GPU"
    bars = {
        f"T {tokens} in 256 sequences, V {options.vocab}: {unit}-ms": {
            n: 1e3 * r[-1].seconds.least for n, r in sequences.items()
        }
    }
    if whole:
        bars[f"GRPO, T {size[0]}, V {size[1]}: {unit}-seconds"] = {
            name: row.seconds.least for name, row in whole.items()
        }
    return report(
        options,
        {"T": tokens, "V": options.vocab, "whole T": size[0], "whole V": size[1], "repeats": options.repeats},
        [sequences_table(sequences, unit), *([whole_table(whole, unit)] if whole else [])],
        {
            "sequences": {name: [asdict(row) for row in rows] for name, rows in sequences.items()},
            "whole": {name: asdict(row) for name, row in whole.items()},
        },
        missed(sequences, whole, device),
        bars,
        growth,
    )


if __name__ == "__main__":
    sys.exit(main())
