"""The table of `verify`, as it stands in a file."""

from __future__ import annotations

import pytest

from parallel_rl.testing.report import Report, Row
from parallel_rl.verify import run


def test_a_long_name_leaves_the_numbers_their_room(capsys: pytest.CaptureFixture[str]) -> None:
    """`components` with its options is wider than a screen, and the errors of every loss were cut to "…"."""
    rows = (Row("tp1", 1.5e-16, 2.5e-16, 3.5e-16, "ok"),)
    run.table([Report(name, rows, seconds=1.0) for name in ("nll", "components-" + "x" * 150)])
    printed = capsys.readouterr().out
    assert "…" not in printed and all(printed.count(number) == 2 for number in ("1.5e-16", "2.5e-16", "3.5e-16"))
