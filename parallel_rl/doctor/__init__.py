"""Checks of the installed stack before a run: packages, megatron-core's contracts, the job's ranks and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "warning", "error"]
_SIGNS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "error": "ERROR  "}


@dataclass(frozen=True)
class Finding:
    """One fact about the stack."""

    subject: str  # a package, a contract, a group
    severity: Severity
    text: str  # what was seen
    advice: str = ""  # what it would do to a run and which setting avoids it; empty if all is well


def as_text(findings: Sequence[Finding]) -> str:
    """Lay findings out, a line each, advice below.

    >>> print(as_text([Finding("torch", "ok", "2.13.0"), Finding("apex", "error", "the unrelated one", "uninstall it")]))
    ok       torch: 2.13.0
    ERROR    apex: the unrelated one
             uninstall it
    """
    lines = []
    for finding in findings:
        lines.append(f"{_SIGNS[finding.severity]}  {finding.subject}: {finding.text}")
        lines += [f"         {finding.advice}"] if finding.advice else []
    return "\n".join(lines)


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if a finding is an error, else 0.

    >>> exit_status([Finding("torch", "warning", "old")])
    0
    """
    return int(any(finding.severity == "error" for finding in findings))
