"""A drawing of boxes, texts and arrows as SVG, on a light card so that it reads on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, LINE, CARD = "#1f2933", "#7b8794", "#f7f9fb"
BLUE, ORANGE, GREEN, RED, GREY = "#cfe3fb", "#fde1c3", "#cdeccf", "#f8cccc", "#e4e7eb"


@dataclass
class Drawing:
    """Shapes on a card of a width and height in pixels."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, text: str = "", fill: str = GREY) -> None:
        """Draw a box with a text in its middle."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" stroke="{LINE}"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 4, text, anchor="middle")

    def row(self, x: float, y: float, w: float, texts: Sequence[str], fill: str = GREY) -> None:
        """Draw boxes side by side, each `w` wide."""
        for place, text in enumerate(texts):
            self.box(x + place * w, y, w - 2, 24, text, fill)

    def text(self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> None:
        """Write a text whose baseline is at `y`."""
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" fill="{INK}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """Draw a line through points."""
        through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polyline points="{through}" fill="none" stroke="{colour}" stroke-width="1.6"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw an arrow between two points."""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{LINE}" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """Return the text of the file."""
        tip = f'<path d="M0 0L8 4L0 8z" fill="{LINE}"/>'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img"',
                ' font-family="system-ui, sans-serif" font-size="13">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
                f"{tip}</marker></defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{CARD}"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )
