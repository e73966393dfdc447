"""Outcome of a whole-step check: a line a layout, the findings, and notes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallel_rl.testing.report import LawBroken
from parallel_rl.testing.whole_step.causes import StepFinding
from parallel_rl.testing.whole_step.compare import Compared


@dataclass(frozen=True)
class WholeStepReport:
    """The outcome of a check of one model's step.

    Attributes:
        name: of the model. rows: one for each layout. findings: differences from one process and their causes.
        notes: what was shrunk, turned off, or not compared. bound: the relative error that passes. seconds: of the check.
    """

    name: str
    rows: tuple[Compared, ...]
    findings: tuple[StepFinding, ...]
    notes: tuple[str, ...]
    bound: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether at least one layout ran, and each that ran matches one process."""
        return not self.findings and any(not row.error for row in self.rows)

    def raise_if_broken(self) -> None:
        """Raise LawBroken with the diagnosis if a layout differs or none could run."""
        if not self.ok:
            raise LawBroken(str(self))

    def as_json(self) -> dict[str, object]:
        """Return plain lists, mappings, numbers and strings; numbers that are not finite become None."""
        return {
            "model": self.name,
            "ok": self.ok,
            "seconds": round(self.seconds, 2),
            "bound": self.bound,
            "layouts": [
                {
                    "layout": row.layout.name,
                    **{
                        f"{what}_error": value if math.isfinite(value) else None
                        for what, value in zip(("loss", "gradient", "norm", "weights"), _numbers(row), strict=True)
                    },
                    "verdict": self.verdict(row),
                }
                for row in self.rows
            ],
            "findings": [
                {**vars(finding), "weights": list(finding.weights), "layouts": list(finding.layouts)}
                for finding in self.findings
            ],
            "notes": list(self.notes),
        }

    def verdict(self, row: Compared) -> str:
        """Return "ok", "not run", or the first difference."""
        if row.refused:
            return "not run"
        named = [finding.what for finding in self.findings if row.layout.name in finding.layouts]
        return named[0] if named else "ok"

    def table(self) -> str:
        """Lay out a line for each layout: relative errors and the verdict."""
        width = max((len(row.layout.name) for row in self.rows), default=6)
        lines = [f"{'layout':<{width}}  {'loss':>8} {'gradient':>8} {'norm':>8} {'weights':>8}  verdict"]
        for row in self.rows:
            numbers = " ".join(f"{_shown(value):>8}" for value in _numbers(row))
            lines.append(f"{row.layout.name:<{width}}  {numbers}  {self.verdict(row)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        ran = sum(not row.error for row in self.rows)
        if self.ok:
            head = f"{self.name}: the step is that of one process on {ran} layouts ({self.seconds:.0f} s)"
        else:
            head = f"{self.name}: the step differs from one process ({self.seconds:.0f} s)"
        lines = [f"  {line}" for finding in self.findings for line in str(finding).splitlines()]
        if not ran:
            lines.append("  no layout could be run")
        return "\n".join([self.table(), "", head, *lines, *(f"  note: {note}" for note in self.notes)])


def _numbers(row: Compared) -> tuple[float, float, float, float]:
    return row.loss, row.gradient, row.norm, row.weights


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0e}"
