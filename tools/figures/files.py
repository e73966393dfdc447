"""File of each drawing."""

from __future__ import annotations

from pathlib import Path

from tools.figures import curves, drawings

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "explanation"
FILES = {
    FOLDER / "the_law.svg": drawings.the_law,
    FOLDER / "tokens.svg": drawings.tokens,
    FOLDER / "policies.svg": drawings.policies,
    **curves.files(DOCS / "reference" / "losses"),
}


def write() -> None:
    """Write every drawing."""
    for file, draw in FILES.items():
        file.write_text(draw().svg(), encoding="utf-8")
