"""The Triton kernels without a card: traps of the language, and thresholds of truncated policies."""

from __future__ import annotations

import pytest

from tests.vocab.triton_cases.run import check_cases

pytest.importorskip("triton")


@pytest.mark.slow
def test_under_the_interpreter() -> None:
    check_cases("traps", "threshold")
