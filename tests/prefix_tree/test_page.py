"""The page on prefix trees runs as it is printed."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "prefix_trees.md"


def test_the_page_runs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    code, _ = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert f"    {printed.getvalue()}" in text
