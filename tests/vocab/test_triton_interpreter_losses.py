"""The Triton kernels without a card: statistics and gradients, from logits and hidden states, on ranks, and the law."""

from __future__ import annotations

import pytest

from tests.vocab.triton_cases.run import check_cases

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("cases", [("kernels", "operators"), ("head", "ranks", "law")], ids=" ".join)
def test_under_the_interpreter(cases: tuple[str, ...]) -> None:
    check_cases(*cases)
