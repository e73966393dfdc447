"""The Triton kernels without a card: traps of the language, and thresholds of truncated policies."""

from __future__ import annotations

import pytest

from tests.vocab.triton_cases.run import check_cases

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["traps", "threshold"])
def test_under_the_interpreter(cases: str) -> None:
    check_cases(cases)
