"""File of each generated page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.reference import api, config, losses, metrics, recipes
from tools.reference.markdown import DOCS

REFERENCE = DOCS / "reference"
#: pages that the checkout has, by their file; a test holds them fresh
COMMITTED: dict[Path, Callable[[], str]] = {
    DOCS / "config.md": config.config_page,
    REFERENCE / "recipes.md": partial(recipes.index, losses.PAGE_OF),
    REFERENCE / "advantages.md": losses.advantages_page,
    REFERENCE / "metrics.md": metrics.metrics_page,
    REFERENCE / "losses" / "index.md": losses.index_page,
    **{REFERENCE / "losses" / f"{family.file}.md": partial(losses.family_page, family) for family in losses.FAMILIES},
}
#: pages that the site alone has: they repeat docstrings and help texts
BUILT: dict[Path, Callable[[], str]] = {
    REFERENCE / "api.md": api.api_page,
    REFERENCE / "command_line.md": api.command_line_page,
}


def write(pages: dict[Path, Callable[[], str]]) -> None:
    """Write pages into their files."""
    for file, make in pages.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(make(), encoding="utf-8")


def stale() -> list[Path]:
    """List the committed pages that are out of date."""
    return [
        file for file, make in COMMITTED.items() if not file.is_file() or file.read_text(encoding="utf-8") != make()
    ]
