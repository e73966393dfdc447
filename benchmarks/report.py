"""Reports of every benchmark's figures: tables, JSON, a plot, the verdict; and the ceilings they are held against."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import machine, verdict, write_json

Bars = Mapping[str, Mapping[str, float]]  # panel → method → number
Growth = dict[str, dict[str, dict[int, float]]]  # axis → method → size → seconds


def add_report_options(parser: argparse.ArgumentParser, *, growth: bool = True) -> None:
    """--json, --plot, --check and, where a benchmark can measure it, --growth."""
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--plot", metavar="FILE", help="draw them here (.png, .svg, .pdf); needs matplotlib")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a figure is missed")
    if growth:
        parser.add_argument("--growth", action="store_true", help="measure how the cost grows, too (takes longer)")


def report(
    options: argparse.Namespace,
    sizes: Mapping[str, Any],
    tables: Sequence[Table],
    results: Any,
    missed: Sequence[str],
    bars: Bars,
    growth: Growth | None = None,
    ceilings: Mapping[str, float] | None = None,
) -> int:
    """Prints, writes and draws what the options ask for; returns the exit status."""
    description = {**machine(), **{name: f"{value:.3g}" for name, value in (ceilings or {}).items()}}
    console = Console(width=max(150, Console().width))
    console.print(", ".join(f"{k} {v}" for k, v in [*sizes.items(), *description.items()]))
    for table in [*tables, *([growth_table(axis, lines) for axis, lines in growth.items()] if growth else [])]:
        console.print(table)
    content = {"machine": description, "options": dict(sizes), "results": results, "missed": list(missed)}
    write_json(options.json, {**content, "growth": growth} if growth else content)
    if options.plot is not None:
        draw(Path(options.plot), bars, growth or {}, ", ".join(f"{k} {v}" for k, v in sizes.items()))
    return verdict(missed, options.check)


def growth_table(axis: str, lines: Mapping[str, Mapping[int, float]]) -> Table:
    """Seconds of each method by size."""
    sizes = sorted({size for line in lines.values() for size in line})
    made = Table("method", title=f"growth with {axis}: seconds, and the factor over the size before")
    for size in sizes:
        made.add_column(f"{axis} {size}", justify="right")
    for name, line in lines.items():
        cells = []
        for before, size in zip([None, *sizes], sizes, strict=False):
            if size not in line:
                cells.append("")
                continue
            factor = "" if before not in line else f" (× {line[size] / line[before]:.2f})"
            cells.append(f"{line[size]:.4f}{factor}")
        made.add_row(name, *cells)
    return made


def draw(path: Path, bars: Bars, growth: Growth, title: str) -> None:
    """A panel of bars for each part, and one of lines for each axis of growth.

    Raises:
        SystemExit: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    panels = len(bars) + len(growth)
    columns = min(2, panels)
    rows = -(-panels // columns)
    most = max(len(line) for line in [*bars.values(), *growth.values()])
    figure = Figure(figsize=(7.5 * columns, (1.2 + 0.32 * most) * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    axes = iter(figure.subplots(rows, columns, squeeze=False).flatten())
    for name, values in bars.items():
        axis = next(axes)
        places = range(len(values))[::-1]
        drawn = axis.barh(places, list(values.values()))
        axis.bar_label(drawn, fmt="%.3g", padding=2, fontsize="small")
        axis.set_yticks(places, list(values), fontsize="small")
        axis.set_title(name, fontsize="small")
        axis.margins(x=0.15)
    for name, lines in growth.items():
        axis = next(axes)
        for method, line in lines.items():
            axis.plot(sorted(line), [line[size] for size in sorted(line)], marker="o", label=method)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlabel(name)
        axis.set_ylabel("seconds")
        axis.legend(fontsize="x-small")
    for unused in axes:
        unused.set_visible(False)
    figure.savefig(path, dpi=130)


def copy_bandwidth(device: str, size: int = 1 << 28, repeats: int = 5) -> float:
    """GB/s, read plus written, of copying `size` bytes: what no pass over as many can beat."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / least_seconds(lambda: target.copy_(source), device, repeats) / 1e9


def matmul_rate(device: str, dtype: torch.dtype, size: int | None = None, repeats: int = 3) -> float:
    """TFLOP/s of a square matrix product in `dtype`."""
    size = size or (8192 if device == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / least_seconds(lambda: a @ b, device, repeats) / 1e12


def least_seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds of one call: CPU-seconds of this process, or the GPU's, the least of the repeats after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        else:
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
    return min(times[1:])
