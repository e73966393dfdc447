"""JSON and a page of the facts of all stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.common import machine
from tools.gpu_check.facts import Fact


@dataclass(frozen=True)
class Outcome:
    """End of a stage ("right", "wrong", "failed" process, "stopped" at its limit) and its facts."""

    stage: str
    ended: str
    seconds: float
    facts: tuple[Fact, ...]


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """One line a stage, what is wrong, and the figures that were missed."""
    lines = [f"{one.stage:8} {one.ended} after {one.seconds:.0f} s, {len(one.facts)} facts" for one in outcomes]
    every = [fact for one in outcomes for fact in one.facts]
    lines += [fact.line for fact in every if fact.kind == "wrong"]
    lines += [f"missed: {fact.line}" for fact in every if fact.missed]
    return lines


def page(outcomes: Sequence[Outcome], card: str) -> str:
    """A section for benchmarks/RESULTS.md."""
    described = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = [
        f"## The check of a card: {card}",
        "",
        f"`make gpu-check`, {datetime.now(timezone.utc):%Y-%m-%d}. {described}.",
        "",
        "| stage | ended | seconds |",
        "|---|---|--:|",
        *(f"| {one.stage} | {one.ended} | {one.seconds:.0f} |" for one in outcomes),
    ]
    for one in outcomes:
        lines += ["", f"### {one.stage}", "", "| | | figure |", "|---|--:|---|"]
        words = {"fact": "", "wrong": "**wrong**: ", "not run": "not run: "}
        lines += [f"| {_cell(x.name)} | {words[x.kind]}{_cell(x.text)} | {x.figure} |" for x in one.facts]
    return "\n".join(lines) + "\n"


def write_json(path: Path, outcomes: Sequence[Outcome], card: str) -> None:
    """Write all facts."""
    content = {"card": card, "machine": machine(), "stages": [asdict(one) for one in outcomes]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
