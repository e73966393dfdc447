"""Settings of the benchmarks' runs: what is compiled is timed on a machine of its own, not here."""

from __future__ import annotations

import pytest

from tests.launch import UNCOMPILED


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing in the processes that a benchmark starts: that takes longer than all the rest."""
    for name, value in UNCOMPILED.items():
        monkeypatch.setenv(name, value)
