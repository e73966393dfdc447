"""The benchmark of packing counts what it says, and refuses a method that loses a sequence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import packing

CASE = packing.Case(512, 8192, 2, 2, 2)


def test_it_tells_which_figure_is_missed() -> None:
    good = packing.Figures(10, 10, 0.96, 1.001, 0.01)
    assert packing.missed({CASE: {packing.OURS: good, "in order": dataclasses.replace(good, efficiency=0.5)}}, 2) == []
    bad = packing.Figures(20, 10, 0.94, 1.02, 0.2)
    lines = packing.missed({CASE: {packing.OURS: bad}}, 2)
    assert len(lines) == 3 and all(line.startswith("512 a rank, 8192 tokens, TP 2 × CP 2, pairs: ") for line in lines)
    assert "94.0%" in lines[0] and "1.020" in lines[1] and "0.20 s; 0.10 s" in lines[2]


def test_a_method_that_loses_or_overfills_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def loses(lengths: packing.Lengths, case: packing.Case, ranks: int) -> list[packing.Batches]:
        return packing.in_order(lengths[: -2 * ranks], case, ranks)

    def overfills(lengths: packing.Lengths, case: packing.Case, ranks: int) -> list[packing.Batches]:
        return [[list(lengths)]]

    for method in (loses, overfills):
        monkeypatch.setitem(packing.METHODS, "in order", method)
        with pytest.raises(RuntimeError, match=r"in order, 512 a rank.*lost sequences"):
            packing.measure(CASE, 2, 300, 1.0, 2000)


def test_every_layout_is_full_and_even(tmp_path: Path) -> None:
    written = tmp_path / "packing.json"
    sizes = ["--sequences", "512", "--tokens", "8192", "--ranks", "2", "--longest", "2048"]
    assert packing.main([*sizes, "--json", str(written)]) == 0
    results = json.loads(written.read_text())["results"]
    assert len(results) == len(packing.LAYOUTS)
    for figures in results.values():
        assert set(figures) == set(packing.METHODS)
        assert figures[packing.OURS]["efficiency"] >= 0.95 and figures[packing.OURS]["imbalance"] <= 1.01
        assert (
            figures[packing.OURS]["efficiency"]
            > figures["in order"]["efficiency"]
            > figures["a fixed number"]["efficiency"]
        )
        assert all(row["micro_batches"] >= row["fewest"] for row in figures.values())
    with pytest.raises(SystemExit):
        packing.main(["--sequences", "511"])
