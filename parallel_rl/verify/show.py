"""The reports as a table for the terminal, and as a page that needs no network."""

from __future__ import annotations

import html as markup
import math
from collections.abc import Sequence
from shutil import get_terminal_size

from rich.console import Console
from rich.table import Table

from parallel_rl.testing.report import Report, Row

_WIDTH = 110  # so that a name and a verdict stay on their line
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1b1b1b;background:#fff}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #ccc}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}.ok{color:#0a6b2b}.bad{color:#a3151a;font-weight:600}"
    "details{margin:.6rem 0}summary{cursor:pointer;font-weight:600}dt{font-weight:600}dd{margin:0 0 .6rem 1rem}"
)


def table(reports: Sequence[Report]) -> None:
    """Print a line for each layout, or for each of several losses, and the diagnoses."""
    console = Console(highlight=False, soft_wrap=True, width=max(get_terminal_size().columns, _WIDTH))
    several = len(reports) > 1
    lines = Table(box=None, pad_edge=False)
    lines.add_column(
        "loss" if several else "layout", overflow="fold"
    )  # a name with its options may be as wide as the screen
    for name in ("loss error", "gradient error", "metric error", "verdict"):
        lines.add_column(name, no_wrap=True, min_width=len(name))
    for report in reports:
        for row in [_worst(report)] if several else report.rows:
            verdict = "[green]ok[/]" if row.verdict == "ok" else f"[red]{row.verdict}[/]"
            where = f"{report.name} ({len(report.rows)} layouts)" if several else row.layout
            lines.add_row(where, *map(_number, (row.loss, row.gradient, row.metrics)), verdict)
    console.print(lines)
    for report in reports:
        if not report.ok:
            console.print()
            console.print(str(report), markup=False)
    broken = sum(not report.ok for report in reports)
    seconds = sum(report.seconds for report in reports)
    console.print(
        f"\n{len(reports) - broken} of {len(reports)} losses obey the law ({seconds:.0f} s)"
        + (f"; [red]{broken} break it[/]" if broken else "")
    )


def _worst(report: Report) -> Row:
    """Make the row of a loss: its largest errors and its verdict."""
    if not report.rows:
        return Row("", math.nan, math.nan, math.nan, report.verdict)
    loss, gradient, metrics = (
        max(values, key=lambda x: math.inf if math.isnan(x) else x)
        for values in zip(*((row.loss, row.gradient, row.metrics) for row in report.rows), strict=True)
    )
    return Row("", loss, gradient, metrics, report.verdict)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1e}"


def html(reports: Sequence[Report]) -> str:
    """Return the reports as a page without scripts, for keyboard and paper too."""
    body = [
        f"<h1>parallel-rl verify</h1><p>{sum(report.ok for report in reports)} of {len(reports)} losses obey the law.</p>"
    ]
    body += [_section(report) for report in reports]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>parallel-rl verify</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _section(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{markup.escape(row.layout)}</td>"
        + "".join(f'<td class="n">{_number(value)}</td>' for value in (row.loss, row.gradient, row.metrics))
        + f'<td class="{"ok" if row.verdict == "ok" else "bad"}">{markup.escape(row.verdict)}</td></tr>'
        for row in report.rows
    )
    entries = "".join(
        f"<dt>{markup.escape(finding.axis)}: {markup.escape(finding.fault.name)}</dt>"
        f"<dd>{markup.escape(finding.text)}<br>Fix: {markup.escape(finding.fault.fix)}.</dd>"
        for finding in report.findings
    )
    verdict = (
        f'<span class="{"ok" if report.ok else "bad"}">{"obeys the law" if report.ok else "breaks the law"}</span>'
    )
    head = "<tr><th>layout</th><th>loss error</th><th>gradient error</th><th>metric error</th><th>verdict</th></tr>"
    return (
        f"<details{'' if report.ok else ' open'}><summary>{markup.escape(report.name)}: {verdict}</summary>"
        f"{f'<dl>{entries}</dl>' if entries else ''}<table>{head}{rows}</table></details>"
    )
