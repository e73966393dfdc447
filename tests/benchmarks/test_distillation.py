"""`benchmarks.distillation` measures what it says, and says which target is missed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import distillation
from benchmarks.common import Seconds
from benchmarks.linear import Figures, check_result
from benchmarks.linear_case import Case
from benchmarks.linear_methods import Method

SHAPE = distillation.Shape(40, 96, 16, 24)


def test_methods_are_right() -> None:
    """Those that compile nothing; the others are checked in each run."""
    case = distillation.make_case(SHAPE, torch.float32, "cpu")
    chosen = [m for m in distillation.methods(1 << 14) if "ompiled" not in m.name and m.name != distillation.LIGER]
    assert len(chosen) == 4
    for method in chosen:
        assert max(check_result(method, case)) < 1e-5


def test_a_wrong_method_is_not_timed() -> None:
    case = distillation.make_case(SHAPE, torch.float32, "cpu")
    right = distillation.methods(None)[0]

    def wrong(hidden: Tensor, weight: Tensor, case: Case) -> Tensor:
        return right.run(hidden, weight, case) + 1e-3 * hidden.sum()

    with pytest.raises(RuntimeError, match="off is wrong"):
        check_result(Method("off", wrong, "peer", distillation.jsd), case)


def test_it_tells_which_target_is_missed() -> None:
    chosen = distillation.methods(None)
    errors = (0.0, 0.0, 0.0)
    results = {m.name: Figures(Seconds(1.0, 1.0), 1000 if m.kind == "peer" else 200, errors) for m in chosen}
    assert distillation.missed(results, chosen) == []
    ours = chosen[0].name
    results[ours] = dataclasses.replace(results[ours], seconds=Seconds(1.3, 1.3), bytes=201)
    time, memory = distillation.missed(results, chosen)
    assert "1.30 x the time" in time and "0.20 x the memory" in memory


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_it_runs_to_its_report(tmp_path: Path) -> None:
    target = tmp_path / "distillation.json"
    sizes = ["--tokens", "64", "--vocab", "256", "--hidden", "16", "--repeats", "1"]
    assert distillation.main([*sizes, "--device", "cpu", "--json", str(target)]) == 0
    written = json.loads(target.read_text())
    assert set(written["results"]) == {m.name for m in distillation.methods(None)}
