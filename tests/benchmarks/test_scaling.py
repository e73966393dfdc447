"""The fitted exponents, and the loop over sequences that ours is measured beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.common import Seconds
from benchmarks.losses_case import agree
from benchmarks.scaling import LOOP, OURS, Figures, Point
from parallel_rl.testing.pool import run_world


def results(power: float = 1.0, slow: float = 2.0) -> scaling.Results:
    """Ours grows as `power` of each size but sequences, which cost nothing; the loop takes `slow` times as long."""

    def line(axis: str, factor: float) -> dict[int, Figures]:
        of = {"sequences": 0.0, "TP": power - 2.0}.get(axis, power)
        return {n: Figures(Seconds(factor * n**of, 1.0), 300 if factor == 1 else 100 * n, 2) for n in (1, 2, 4)}

    return {axis: {OURS: line(axis, 1.0), LOOP: line(axis, slow)} for axis in ("T", "V", "TP", "sequences")}


def test_exponents_are_the_slopes_of_logarithms() -> None:
    found = scaling.exponents(results(1.07))
    assert found["T"][OURS] == pytest.approx({"seconds": 1.07, "operators": 0.0}, abs=1e-12)
    assert found["TP"][OURS]["seconds"] == pytest.approx(0.07), "of all ranks together"
    assert found["sequences"][LOOP]["operators"] == pytest.approx(1.0)


def test_it_tells_which_figure_is_missed() -> None:
    assert scaling.missed(results()) == []
    assert [line.split(",")[0] for line in scaling.missed(results(1.2))] == [
        "our seconds grow with T to the power 1.20",
        "our seconds grow with V to the power 1.20",
    ]
    assert len(scaling.missed(results(slow=0.9))) == 11, "one sequence is no loop"


def test_the_loop_is_the_loss_that_it_is_measured_beside() -> None:
    steps = scaling._steps(0, Point(64, 48, 4, 1))
    found = [steps[name]() for name in (LOOP, OURS)]
    agree(LOOP, *found)
    with pytest.raises(RuntimeError, match="a loop over sequences is wrong"):
        agree(LOOP, (found[0][0] * 1.001, found[0][1]), found[1])


@pytest.mark.slow
def test_it_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pool's worlds of 1, 2 and 4 ranks; processes of its own would import torch for half a minute."""
    monkeypatch.setattr(scaling, "run_ranks", run_world)
    target = tmp_path / "scaling.json"
    sizes = ["--tokens", "256", "--vocab", "64", "--repeats", "1"]
    assert scaling.main([*sizes, "--json", str(target)]) == 0
    written = json.loads(target.read_text())["results"]["figures"]
    assert {axis: sorted(map(int, line[OURS])) for axis, line in written.items()} == {
        "T": [64, 128, 256, 512], "V": [16, 32, 64, 128], "TP": [1, 2, 4], "sequences": [1, 4, 16, 64],
    }  # fmt: skip
