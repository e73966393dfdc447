"""`check_law` on right and wrong losses: each planted fault is found and named."""

from __future__ import annotations

import pytest

from parallel_rl.testing.check import check_law
from parallel_rl.testing.pool import preload
from tests.testing.planted import PLANTED, Planted

preload("parallel_rl.testing.check", "tests.testing.planted")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str) -> None:
    """The diagnosis comes from the numbers: nothing in it knows the losses."""
    loss, fault, axis = PLANTED[name]
    report = check_law(loss, worlds=(1, 2))
    print(report)
    assert not report.ok
    assert any(one.fault == fault and axis in one.axis.split(", ") for one in report.findings)
    assert {one.fault.name for one in report.findings} == {fault.name}, "one cause, one name"


def test_the_loss_without_a_fault_obeys() -> None:
    assert check_law(Planted).ok
