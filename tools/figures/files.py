"""Which drawing stands in which file."""

from __future__ import annotations

from pathlib import Path

from tools.figures import drawings

FOLDER = Path(__file__).parents[2] / "docs" / "explanation"
FILES = {
    FOLDER / "the_law.svg": drawings.the_law,
    FOLDER / "tokens.svg": drawings.tokens,
    FOLDER / "policies.svg": drawings.policies,
}


def write() -> None:
    """Write every drawing."""
    for file, draw in FILES.items():
        file.write_text(draw().svg(), encoding="utf-8")
