"""Fill of micro-batches and balance of data ranks on lognormal lengths: ours beside what keeps the order of the data.

A step's sequences go to data ranks and into packed rows of a fixed capacity. Efficiency is true tokens over the capacity of
all rows; a part that is missing is padding to what the layout needs, or room that no sequence fits. Imbalance is the tokens of
the fullest data rank over their mean: what the others wait for. `python -m benchmarks.packing --help`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

from rich.table import Table

from benchmarks.report import Growth, add_report_options, least_seconds, report
from parallel_rl.training.batching.bin_packing import Capacity, deal, pack

EFFICIENCY = 0.95
IMBALANCE = 1.01
SECONDS_A_SEQUENCE = 1e-4  # next to nothing beside what a model takes for it
OURS = "balanced, first-fit decreasing"
Lengths = Sequence[int]
Batches = list[list[int]]  # the lengths in each micro-batch


class Case(NamedTuple):
    """A step: sequences on each data rank, the capacity of a micro-batch, the layout, and rows that stay together."""

    sequences: int
    tokens: int
    tensor: int
    context: int
    together: int

    @property
    def capacity(self) -> Capacity:
        return Capacity.of_layout(self.tokens, tensor=self.tensor, context=self.context)

    @property
    def name(self) -> str:
        pairs = ", pairs" if self.together == 2 else ""
        return f"{self.sequences} a rank, {self.tokens} tokens, TP {self.tensor} × CP {self.context}{pairs}"


LAYOUTS = ((1, 1, 1), (1, 1, 2), (2, 2, 1), (8, 8, 1))  # tensor, context, rows that stay together


@dataclass(frozen=True)
class Figures:
    """Figures of one way to make micro-batches; `fewest` is what no way can go below."""

    micro_batches: int
    fewest: int
    efficiency: float
    imbalance: float
    seconds: float


Results = dict[Case, dict[str, Figures]]


def lognormal_lengths(count: int, median: int, sigma: float, longest: int, seed: int = 0) -> list[int]:
    """Lengths whose logarithm is normal, none above `longest`."""
    generator = random.Random(seed)
    return [min(longest, max(1, round(median * generator.lognormvariate(0, sigma)))) for _ in range(count)]


def balanced(lengths: Lengths, case: Case, ranks: int) -> list[Batches]:
    """Ours: units are redistributed over all ranks, then packed by first-fit decreasing."""
    units = [lengths[first : first + case.together] for first in range(0, len(lengths), case.together)]
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for unit, owner in zip(units, deal([sum(unit) for unit in units], ranks), strict=True):
        mine[owner].extend(unit)
    return [_packed(share, case) for share in mine]


def as_drawn(lengths: Lengths, case: Case, ranks: int) -> list[Batches]:
    """First-fit decreasing on equal numbers of sequences a rank."""
    return [_packed(share, case) for share in _shares(lengths, ranks)]


def in_order(lengths: Lengths, case: Case, ranks: int) -> list[Batches]:
    """Sequences as they come, a new micro-batch where one does not fit."""
    return [_next_fit(share, case) for share in _shares(lengths, ranks)]


def by_number(lengths: Lengths, case: Case, ranks: int) -> list[Batches]:
    """Put as many sequences into each micro-batch as always fit: those of the longest."""
    size = max(1, case.capacity.usable // (case.capacity.padded(max(lengths)) * case.together)) * case.together
    return [
        [list(share[first : first + size]) for first in range(0, len(share), size)] for share in _shares(lengths, ranks)
    ]


def _packed(lengths: Lengths, case: Case) -> Batches:
    bins = pack(lengths, case.capacity, case.together)
    return [[lengths[place] for place in places] for places in bins]


def _next_fit(lengths: Lengths, case: Case) -> Batches:
    capacity = case.capacity
    batches: Batches = [[]]
    left = capacity.usable
    for first in range(0, len(lengths), case.together):
        unit = lengths[first : first + case.together]
        room = sum(map(capacity.padded, unit))
        if room > left:
            batches.append([])
            left = capacity.usable
        batches[-1].extend(unit)
        left -= room
    return batches


def _shares(lengths: Lengths, ranks: int) -> list[Lengths]:
    size = len(lengths) // ranks
    return [lengths[rank * size : (rank + 1) * size] for rank in range(ranks)]


METHODS: dict[str, Callable[[Lengths, Case, int], list[Batches]]] = {
    OURS: balanced,
    "first-fit decreasing": as_drawn,
    "in order": in_order,
    "a fixed number": by_number,
}


def measure(case: Case, ranks: int, median: int, sigma: float, longest: int) -> dict[str, Figures]:
    """Every method on the same lengths.

    Raises:
        RuntimeError: a method lost a sequence, or put more into a micro-batch than it holds.
    """
    lengths = lognormal_lengths(case.sequences * ranks, median, sigma, longest)
    capacity = case.capacity
    fewest = -(-sum(map(capacity.padded, lengths)) // capacity.usable)
    found = {}
    for name, method in METHODS.items():
        start = time.process_time()
        of_ranks = method(lengths, case, ranks)
        seconds = time.process_time() - start
        batches = [batch for of_rank in of_ranks for batch in of_rank]
        fullest = max(sum(map(capacity.padded, batch)) for batch in batches)
        if sorted(length for batch in batches for length in batch) != sorted(lengths) or fullest > capacity.usable:
            raise RuntimeError(f"{name}, {case.name}: {fullest} tokens in a micro-batch, or lost sequences")
        tokens = [sum(map(sum, of_rank)) for of_rank in of_ranks]
        efficiency = sum(lengths) / (len(batches) * capacity.usable)
        found[name] = Figures(len(batches), fewest, efficiency, max(tokens) * ranks / sum(tokens), seconds)
    return found


def measure_growth(median: int, sigma: float, longest: int, tokens: int) -> Growth:
    """CPU-seconds of a deal and of a packing, up to 131072 sequences."""
    growth: Growth = {"sequences": {"deal": {}, "pack": {}}}
    for count in (2048, 8192, 32768, 131072):
        lengths = lognormal_lengths(count, median, sigma, longest)
        of_count = growth["sequences"]
        of_count["deal"][count] = least_seconds(partial(deal, lengths, 64), "cpu", 2)
        of_count["pack"][count] = least_seconds(partial(pack, lengths, Capacity(tokens)), "cpu", 2)
    return growth


def missed(results: Results, ranks: int) -> list[str]:
    """List the missed figures: full, even, and soon done."""
    lines = []
    for case, figures in results.items():
        ours, limit = figures[OURS], SECONDS_A_SEQUENCE * case.sequences * ranks
        if ours.efficiency < EFFICIENCY:
            lines.append(f"{case.name}: {ours.efficiency:.1%} of the capacity is used; {EFFICIENCY:.0%} is the figure")
        if ours.imbalance > IMBALANCE:
            lines.append(
                f"{case.name}: the fullest rank has {ours.imbalance:.3f} × the mean; {IMBALANCE} is the figure"
            )
        if ours.seconds > limit:
            lines.append(f"{case.name}: {ours.seconds:.2f} s; {limit:.2f} s is the figure")
    return lines


def table(results: Results, ranks: int) -> Table:
    made = Table("step", "method", title=f"micro-batches of packed sequences on {ranks} data ranks")
    for heading in ("micro-batches", "at least", "efficiency", "imbalance", "seconds"):
        made.add_column(heading, justify="right")
    for case, figures in results.items():
        for name, row in figures.items():
            numbers = f"{row.micro_batches}", f"{row.fewest}", f"{row.efficiency:.1%}", f"{row.imbalance:.3f}"
            step = case.name if name == OURS else ""
            made.add_row(step, name, *numbers, f"{row.seconds:.3f}", end_section=name == list(figures)[-1])
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 8192], help="of a step on each data rank")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536], help="capacities of a micro-batch")
    parser.add_argument("--ranks", type=int, default=8, help="data ranks")
    parser.add_argument("--median", type=int, default=512, help="of the lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithms")
    parser.add_argument("--longest", type=int, default=4096, help="no length is above")
    add_report_options(parser)
    options = parser.parse_args(arguments)
    if min(*options.sequences, options.ranks, options.median, options.longest) < 1 or options.sigma <= 0:
        parser.error("sizes must be positive")
    if any(count % 2 for count in options.sequences):
        parser.error("--sequences must be even: a pair is two")
    least = 2 * options.longest + 128  # padding on TP 8 × CP 8 included
    if min(options.tokens) < least:
        parser.error(
            f"--tokens {min(options.tokens)} must be at least {least}: two sequences of --longest stay together"
        )
    cases = [Case(n, tokens, *layout) for n in options.sequences for tokens in options.tokens for layout in LAYOUTS]
    results = {case: measure(case, options.ranks, options.median, options.sigma, options.longest) for case in cases}
    growth = (
        measure_growth(options.median, options.sigma, options.longest, options.tokens[0]) if options.growth else None
    )
    sizes = {"ranks": options.ranks, "median": options.median, "sigma": options.sigma, "longest": options.longest}
    return report(
        options,
        sizes,
        [table(results, options.ranks)],
        {case.name: {name: asdict(row) for name, row in figures.items()} for case, figures in results.items()},
        missed(results, options.ranks),
        {case.name: {name: row.efficiency for name, row in figures.items()} for case, figures in results.items()},
        growth,
    )


if __name__ == "__main__":
    sys.exit(main())
