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
    """One layout's line."""

    layout: str  # its name
    loss: float  # relative errors
    gradient: float
    metrics: float  # of the worst metric
    verdict: str  # "ok", or the name of the fault

    @classmethod
    def of(cls, seen: Observation, findings: Sequence[Finding], tolerance: float) -> Row:
        verdict = "ok"
        if seen.broken(tolerance):
            named = [finding.fault.name for finding in findings if seen.layout.name in finding.layouts]
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
                    "fault": finding.fault.name,
                    "axis": finding.axis,
                    "text": finding.text,
                    "fix": finding.fault.fix,
                    "layouts": list(finding.layouts),
                }
                for finding in self.findings
            ],
            "skipped": list(self.skipped),
        }

    def __str__(self) -> str:
        if self.ok:
            return f"{self.name}: the law holds on {len(self.rows)} layouts"
        lines = [f"  {line}" for finding in self.findings for line in str(finding).splitlines()]
        return "\n".join([f"{self.name} breaks the law", *(lines or ["  no layout could be run"])])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
