"""Report of a check as text, JSON or an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallel_rl.testing.diagnosis import Finding
from parallel_rl.testing.observe import Observation


class LawBroken(AssertionError):
    """A loss depends on the layout, or already fails on one process."""


@dataclass(frozen=True)
class Row:
    """One layout's line.

    Attributes:
        layout: its name.
        loss, gradient, metrics: relative errors, of the worst metric.
        verdict: "ok", or the name of the fault.
    """

    layout: str
    loss: float
    gradient: float
    metrics: float
    verdict: str

    @classmethod
    def of(cls, seen: Observation, findings: Sequence[Finding], tolerance: float) -> Row:
        """Make the line of an observation, with the first finding that names it."""
        verdict = "ok"
        if seen.broken(tolerance):
            named = [one.fault.name for one in findings if seen.layout.name in one.layouts]
            verdict = named[0] if named else (findings[0].fault.name if findings else "broken")
        return cls(seen.layout.name, seen.loss, seen.gradient, max(seen.metrics.values(), default=0.0), verdict)


@dataclass(frozen=True)
class Report:
    """Report of a check of one loss.

    Attributes:
        rows: a line per layout.
        findings: faults and causes; empty if the law holds.
        skipped: unchecked parts, and why.
        seconds: duration.
    """

    name: str
    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()
    skipped: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Return whether the law holds."""
        return not self.findings and bool(self.rows)

    @property
    def verdict(self) -> str:
        """Return "ok", or the name of the first fault."""
        if self.ok:
            return "ok"
        return self.findings[0].fault.name if self.findings else "no layout"

    def raise_if_broken(self) -> None:
        """Raise LawBroken with the diagnosis if the law is broken."""
        if not self.ok:
            raise LawBroken(str(self))

    def as_json(self) -> dict[str, object]:
        """Convert to plain lists, mappings, numbers and strings; nonfinite numbers become None."""
        return {
            "loss": self.name,
            "ok": self.ok,
            "seconds": round(self.seconds, 2),
            "layouts": [
                {
                    "layout": row.layout,
                    "loss_error": _finite(row.loss),
                    "gradient_error": _finite(row.gradient),
                    "metric_error": _finite(row.metrics),
                    "verdict": row.verdict,
                }
                for row in self.rows
            ],
            "findings": [
                {
                    "fault": one.fault.name,
                    "axis": one.axis,
                    "text": one.text,
                    "fix": one.fault.fix,
                    "layouts": list(one.layouts),
                }
                for one in self.findings
            ],
            "skipped": list(self.skipped),
        }

    def __str__(self) -> str:
        if self.ok:
            return f"{self.name}: the law holds on {len(self.rows)} layouts"
        lines = [f"  {line}" for one in self.findings for line in str(one).splitlines()]
        return "\n".join([f"{self.name} breaks the law", *(lines or ["  no layout could be run"])])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
