"""Facts of a stage: printed at once, and kept in a file that survives a stopped stage."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["fact", "wrong", "not run"]


@dataclass(frozen=True)
class Fact:
    """One fact; `most` and `least` are the figures that its value is held against.

    Attributes:
        value: a number in `unit`, or words: what it is, what is wrong, why it did not run.
    """

    stage: str
    name: str
    value: float | str
    unit: str = ""
    most: float | None = None
    least: float | None = None
    kind: Kind = "fact"

    @property
    def missed(self) -> bool:
        """Whether its figure is not met."""
        if isinstance(self.value, str):
            return False
        over = self.most is not None and not self.value <= self.most
        return over or (self.least is not None and not self.value >= self.least)

    @property
    def text(self) -> str:
        """The value with its unit."""
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        return f"{value} {self.unit}".strip()

    @property
    def figure(self) -> str:
        """What the value is held against, and whether it is met."""
        bounds = [f"{word} {bound:.4g}" for word, bound in (("≤", self.most), ("≥", self.least)) if bound is not None]
        return " and ".join(bounds) + (": missed" if self.missed else ": met") if bounds else ""

    @property
    def line(self) -> str:
        """The fact as one line."""
        words = {"fact": "", "wrong": "WRONG: ", "not run": "not run: "}[self.kind]
        return f"{self.stage:8} {self.name}: {words}{self.text}" + (f" ({self.figure})" if self.figure else "")


class Facts:
    """The facts of one stage."""

    def __init__(self, stage: str, path: Path | None = None) -> None:
        self.stage, self.path = stage, path
        self.all: list[Fact] = []

    def tell(
        self, name: str, value: float | str, unit: str = "", *, most: float | None = None, least: float | None = None
    ) -> None:
        """Report a fact."""
        self._add(Fact(self.stage, name, value, unit, most, least))

    def check(self, name: str, right: bool, why: str = "") -> None:
        """Report that a check passed, or its fault."""
        self._add(Fact(self.stage, name, "right") if right else Fact(self.stage, name, why or "no", kind="wrong"))

    def not_run(self, name: str, why: str | BaseException) -> None:
        """Report a peer or part that this machine cannot run."""
        text = _short(why) if isinstance(why, BaseException) else str(why)
        self._add(Fact(self.stage, name, text, kind="not run"))

    @contextlib.contextmanager
    def optional(self, name: str) -> Iterator[None]:
        """Report a failure inside as not run: for third-party code."""
        try:
            yield
        except Exception as error:
            self.not_run(name, error)

    @contextlib.contextmanager
    def required(self, name: str) -> Iterator[None]:
        """Report a failure inside as wrong with its traceback, and continue the stage."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(name, False, _short(error))

    @property
    def right(self) -> bool:
        """Whether nothing was wrong."""
        return all(fact.kind != "wrong" for fact in self.all)

    def _add(self, fact: Fact) -> None:
        self.all.append(fact)
        print(fact.line, flush=True)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(fact)) + "\n")


def _short(error: BaseException) -> str:
    """Render an error in one line: the last line of an error from another process."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("-- Process") else f"{type(error).__name__}: {lines[0]}"


def read_facts(path: Path) -> list[Fact]:
    """The facts that a stage left; a last line that was cut off is left out."""
    found: list[Fact] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(Fact(**json.loads(line)))
    return found
