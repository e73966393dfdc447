"""`make audit`: what pip-audit reports becomes an exit status, and what could not be looked up is never called clean."""

from __future__ import annotations

import pytest

from tools.audit import installed, summary


def test_a_known_vulnerability_fails_and_what_was_not_looked_up_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    clean = {"name": "a", "version": "1", "vulns": []}
    bad = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
    skipped = {"name": "c", "skip_reason": "not found"}
    assert summary([clean]) == 0 == summary([clean, skipped])
    assert "0 known vulnerabilities in 1 packages; without an answer: c" in capsys.readouterr().out
    assert summary([clean, bad]) == 1
    assert "b 2: PYSEC-1, fixed in 3" in capsys.readouterr().err


def test_local_builds_are_asked_for_by_their_version() -> None:
    names = [line.partition("==")[0] for line in installed()]
    assert "torch" in names and "parallel-rl" not in names and not any("+" in line for line in installed())
