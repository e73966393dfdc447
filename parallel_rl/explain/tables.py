"""Building blocks of the page: sections, tables, and one step or two side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel_rl.explain.read import Step

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Numbers under a caption; the first column names the row.

    A long table that is drawn as well is not printed on paper.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    on_paper: bool = True


@dataclass(frozen=True)
class Section:
    """One question that the page answers.

    Attributes:
        key: of its link. title, says: for the reader.
        tables: shown. svg: the chart. details: tables that are folded away.
    """

    key: str
    title: str
    says: str
    tables: tuple[Table, ...] = ()
    svg: str = ""
    details: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Sides:
    """One or two steps and how they are called in tables and charts."""

    steps: tuple[Step, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return ("A", "B") if len(self.steps) > 1 else ("",)

    def head(self, first: str, *names: str) -> tuple[str, ...]:
        """Return the columns `names` of each step."""
        return first, *(f"{name} {label}".strip() for label in self.labels for name in names)

    def compared(self, caption: str, first: str, of_steps: Sequence[Mapping[str, Cell]]) -> Table:
        """Return a row per name under `first`, with one number per step; of two, their difference too."""
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
