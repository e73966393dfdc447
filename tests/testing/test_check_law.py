"""`check_law` on right and wrong losses: each planted fault is found and named."""

from __future__ import annotations

import pytest

from parallel_rl.testing.check import check_law
from parallel_rl.testing.layouts import Layout
from parallel_rl.testing.pool import preload
from tests.testing.planted import PLANTED, Planted

preload("parallel_rl.testing.check", "tests.testing.planted")


ONE_PROCESS = ("one process", "micro-batches", "packing")
#: the faults that `make test` plants: of one process, and the first for each axis of ranks
QUICK = {name for name, (*_, axis) in PLANTED.items() if axis in ONE_PROCESS}
QUICK |= {*{axis: name for name, (*_, axis) in reversed(PLANTED.items())}.values()}
RUNS = [
    *(
        pytest.param(name, (1,) if axis in ONE_PROCESS else (1, 2), marks=() if name in QUICK else pytest.mark.slow)
        for name, (_, _, axis) in PLANTED.items()
    ),
    *(
        pytest.param(name, (1, 2), marks=pytest.mark.slow)
        for name in {axis: name for name, (_, _, axis) in PLANTED.items() if axis in ONE_PROCESS}.values()
    ),
]


@pytest.mark.parametrize(("name", "worlds"), RUNS)
def test_a_planted_fault_is_named(name: str, worlds: tuple[int, ...]) -> None:
    """The diagnosis comes from the numbers: nothing in it knows the losses."""
    loss, fault, axis = PLANTED[name]
    report = check_law(loss, worlds=worlds)
    print(report)
    assert not report.ok
    assert any(one.fault == fault and axis in one.axis.split(", ") for one in report.findings)
    assert {one.fault.name for one in report.findings} == {fault.name}, "one cause, one name"


def test_the_loss_without_a_fault_obeys() -> None:
    assert check_law(Planted).ok


def test_chosen_layouts_stand_for_the_default_ones() -> None:
    layout = Layout(1, 1, 2, "packed", 3, "zigzag")
    report = check_law(Planted, layouts=[layout])
    assert report.ok and [row.layout for row in report.rows] == [layout.name]
