"""`benchmarks.linear` measures what it says, and says which target is missed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import linear
from benchmarks.common import Seconds
from benchmarks.linear_methods import Case, Method, grpo, make_case, methods, weighted


def test_it_tells_which_target_is_missed() -> None:
    chosen = methods("cpu", None)
    errors = (0.0, 0.0, 0.0)
    results = {m.name: linear.Figures(Seconds(1.0, 1.0), 1000 if m.kind == "peer" else 200, errors) for m in chosen}
    assert linear.missed(results, chosen, "cpu") == []
    ours, again = chosen[0].name, chosen[1].name
    slow = {**results, ours: dataclasses.replace(results[ours], seconds=Seconds(1.2, 1.2))}
    slow[again] = dataclasses.replace(results[again], bytes=201)
    first, second = linear.missed(slow, chosen, "cpu")
    assert ours in first and "1.20 x the time" in first and again in second and "0.20 x the memory" in second
    (whole,) = (m for m in chosen if m.objective is grpo and m.kind == "in_forward")
    heavy = {**results, whole.name: dataclasses.replace(results[whole.name], seconds=Seconds(1.2, 1.2))}
    quick = {
        m.name: dataclasses.replace(results[m.name], seconds=Seconds(0.5, 0.5)) for m in chosen if m.objective is grpo
    }
    (line,) = linear.missed(heavy, chosen, "cpu")
    assert whole.name in line
    (line,) = linear.missed({**results, **quick, whole.name: results[whole.name]}, chosen, "cpu")
    assert whole.name in line and "2.00 x the time" in line  # peers of the other objective do not count
    at_length = {m.name: linear.Figures(Seconds(0.04, 0.04), 6 * 10**8, errors) for m in chosen}
    lines = linear.missed(at_length, chosen, "cuda")
    assert [line.split(" takes")[0] for line in lines] == [ours, ours, again, chosen[2].name]


@pytest.mark.slow
def test_every_method_that_runs_here_is_right() -> None:
    case = make_case(48, 96, 16, torch.float32, "cpu")
    for method in methods("cpu", 1 << 14):
        if "Megatron" not in method.name:  # it wants its groups
            assert max(linear.check_result(method, case)) < 1e-5


def test_a_wrong_method_is_not_timed() -> None:
    case = make_case(48, 96, 16, torch.float32, "cpu")
    for objective in (weighted, grpo):
        right = next(m for m in methods("cpu", None) if m.objective is objective)

        def wrong(hidden: Tensor, weight: Tensor, case: Case, right: Method = right) -> Tensor:
            return right.run(hidden, weight, case) * 1.001

        with pytest.raises(RuntimeError, match="off is wrong"):
            linear.check_result(Method("off", wrong, "peer", objective), case)


@pytest.mark.slow
def test_it_runs_to_its_report(tmp_path: Path) -> None:
    target = tmp_path / "linear.json"
    sizes = ["--tokens", "64", "--vocab", "256", "--hidden", "16", "--repeats", "1", "--growth"]
    assert linear.main([*sizes, "--device", "cpu", "--json", str(target)]) == 0
    written = json.loads(target.read_text())
    assert set(written["results"]) == {m.name for m in methods("cpu", None)}
    assert set(written["growth"]) == {"T", "V", "D"}
