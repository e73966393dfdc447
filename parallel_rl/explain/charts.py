"""Sections and tables of the page, and charts as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel_rl.explain.measures import LogHistogram
from parallel_rl.explain.read import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: of the first and of the second step; told apart without colour by the line's and the filling's style
COLOURS, LINES, FILLS = ("#1f5fa8", "#b4510b"), ("-", "--"), (0.25, 0.0)
_SETTINGS = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
}


class Drawing:
    svg = ""  # set when the chart is closed


@contextmanager
def _axes(key: str, height: float = 2.6) -> Iterator[tuple[Drawing, Any]]:
    import matplotlib
    from matplotlib.figure import Figure

    drawing = Drawing()
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": key}):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        yield drawing, figure
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing.svg = _inline(file.getvalue(), key)


def _inline(text: str, key: str) -> str:
    """Return the svg element with ids that begin with `key`, unique on the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{key}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", text)
    text = re.sub(
        r'<svg ([^>]*?)width="[^"]*" ',
        r"<svg \1",
        re.sub(r'<svg ([^>]*?)height="[^"]*" ', r"<svg \1", text, count=1),
        count=1,
    )
    return text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def histogram(
    key: str,
    parts: Sequence[LogHistogram],
    labels: Sequence[str],
    x_label: str,
    bounds: Sequence[tuple[float, float]] = (),
) -> str:
    """Draw histograms with equal edges on log axes; end bars are the tails, `bounds` are marked ranges."""
    with _axes(key) as (drawing, figure):
        axes: Axes = figure.subplots()
        step = parts[0].edges[1] / parts[0].edges[0]
        edges = np.concatenate([[parts[0].edges[0] / step**2], parts[0].edges, [parts[0].edges[-1] * step**2]])
        for index, part in enumerate(parts):
            counts = np.concatenate([[part.below], part.counts, [part.above]])
            axes.stairs(
                counts, edges, color=COLOURS[index], linestyle=LINES[index], linewidth=1.4, label=labels[index] or None
            )
            axes.stairs(counts, edges, color=COLOURS[index], fill=True, alpha=FILLS[index])
        for index, (low, high) in enumerate(bounds):
            for bound in (low, high):
                if np.isfinite(bound):
                    axes.axvline(bound, color=COLOURS[index], linestyle=":", linewidth=1.2)
        axes.axvline(1.0, color="#444444", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        _plain_ticks(axes, edges[0], edges[-1])
        axes.set(xlabel=x_label, ylabel="tokens")
        if any(labels):
            axes.legend(frameon=False)
    return drawing.svg


def _plain_ticks(axes: Axes, low: float, high: float) -> None:
    """Format counts as plain numbers; the other axis too, below two decades."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))

    if high / low < 100:
        places = np.exp(np.linspace(np.log(low), np.log(high), 7))
        axes.xaxis.set_major_locator(FixedLocator(sorted({float(f"{x:.4g}") for x in places})))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.4g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def lines(
    key: str, panels: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], labels: Sequence[str], x_label: str
) -> str:
    """Draw a panel per name under one x axis, with a line (places, values) per step."""
    from matplotlib.ticker import MaxNLocator

    with _axes(key, 1.0 + 1.35 * len(panels)) as (drawing, figure):
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, parts) in zip(rows, panels.items(), strict=True):
            for index, (places, values) in enumerate(parts):
                marker = "os"[index]
                axes.plot(
                    places, values, LINES[index], color=COLOURS[index], marker=marker, markersize=3, linewidth=1.3,
                    label=labels[index] or None,
                )  # fmt: skip
            axes.set_ylabel(name)
        rows[-1].set_xlabel(x_label)
        rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        if any(labels):
            rows[0].legend(frameon=False)
    return drawing.svg


def bars(key: str, names: Sequence[str], parts: Sequence[Sequence[float]], labels: Sequence[str], x_label: str) -> str:
    """Draw a horizontal bar per name and step; return "" if all values are 0."""
    if not any(value for values in parts for value in values):
        return ""
    with _axes(key, 0.7 + 0.32 * len(names) * len(parts)) as (drawing, figure):
        axes: Axes = figure.subplots()
        size = 0.8 / len(parts)
        for index, values in enumerate(parts):
            places = np.arange(len(names)) + (index - (len(parts) - 1) / 2) * size
            axes.barh(
                places, values, size * 0.9, color=COLOURS[index], hatch="///" if index else None,
                edgecolor="white", label=labels[index] or None,
            )  # fmt: skip
        axes.set_yticks(np.arange(len(names)), names)
        axes.invert_yaxis()
        axes.axvline(0, color="#444444", linewidth=0.8)
        axes.set_xlabel(x_label)
        if any(labels):
            axes.legend(frameon=False)
    return drawing.svg


Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Numbers under a caption, the first column the row's name; `on_paper` false hides it in print."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    on_paper: bool = True


@dataclass(frozen=True)
class Section:
    """Section of the page with link `key`: text `says`, chart, tables, and folded tables `details`."""

    key: str
    title: str
    says: str
    tables: tuple[Table, ...] = ()
    svg: str = ""
    details: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Sides:
    """One or two steps and their labels."""

    steps: tuple[Step, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return ("A", "B") if len(self.steps) > 1 else ("",)

    def head(self, first: str, *names: str) -> tuple[str, ...]:
        """Return the columns `names` of each step."""
        return first, *(f"{name} {label}".strip() for label in self.labels for name in names)

    def compared(self, caption: str, first: str, of_steps: Sequence[Mapping[str, Cell]]) -> Table:
        """Make a table with a row per name: one number per step and, of two steps, the difference."""
        rows: list[tuple[Cell, ...]] = []
        for name in dict.fromkeys(name for one in of_steps for name in one):
            values = [one.get(name) for one in of_steps]
            more: list[Cell] = []
            if len(values) > 1:
                numbers = [x for x in values if isinstance(x, (int, float))]
                more = [numbers[1] - numbers[0] if len(numbers) == len(values) else None]
            rows.append((name, *values, *more))
        difference = ["B − A"] if len(self.steps) > 1 else []
        return Table(caption, (*self.head(first, "value"), *difference), tuple(rows))
