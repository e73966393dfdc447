"""The benchmark of a card, without one: that it refuses wrong methods, tells what is missed, and runs to its report."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import token_stats_gpu as bench
from benchmarks.common import Seconds
from benchmarks.token_stats_gpu_methods import ENTROPY, OURS, SHARD, Case, Method, make_case, methods, shard

METHODS = [*methods("cpu", "eager"), shard("eager")]


def results() -> dict[str, bench.Figures]:
    """On a card that copies 4000 GB/s: ours at 90 % of it, peers at half of ours."""
    ours = bench.Figures(Seconds(5e-4, 5e-4), Seconds(1.6e-3, 1.6e-3), 0.01, 0.01, 3600.0, 3600.0)
    peer = bench.Figures(Seconds(1e-3, 1e-3), Seconds(3e-3, 3e-3), 4.0, 6.0, 1800.0, 1800.0)
    shard = dataclasses.replace(ours, forward=Seconds(7e-5, 7e-5), both=Seconds(2e-4, 2e-4))
    return {m.name: shard if m.name == SHARD else ours if m.kind == "ours" else peer for m in METHODS}


def missed(figures: dict[str, bench.Figures], card: str = "NVIDIA H200", is_the_shape: bool = True) -> list[str]:
    return bench.missed(figures, METHODS, 4000.0, card, is_the_shape)


def test_it_tells_which_figure_is_missed() -> None:
    assert missed(results()) == []
    slow = results()
    slow[SHARD] = dataclasses.replace(slow[SHARD], both=Seconds(3e-4, 3e-4))
    (line,) = missed(slow)
    assert "TP 8 takes 0.300 ms (both), over 0.22" in line
    assert missed(slow, card="NVIDIA A100") == [] and missed(slow, is_the_shape=False) == []
    slow = results()
    slow[OURS] = dataclasses.replace(slow[OURS], forward_bandwidth=3000.0, both_bytes=0.5)
    assert len(missed(slow)) == 2
    slow = results()
    slow[ENTROPY] = dataclasses.replace(slow[ENTROPY], forward=Seconds(5.4e-4, 5.4e-4))
    (line,) = missed(slow)
    assert "the entropy costs 8% (forward)" in line
    fast = results()
    fast["torch cross_entropy"] = dataclasses.replace(fast["torch cross_entropy"], both=Seconds(8e-4, 8e-4))
    (line,) = missed(fast)
    assert "torch cross_entropy takes 0.50 x our time (both)" in line


def test_a_wrong_method_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CHECKED", 3)
    case = make_case(8, 64, torch.float32, "cpu")
    right = METHODS[0]
    bench.check_result(right, case, torch.empty_like(case.logits))

    def start(work: Tensor, case: Case):  # type: ignore[no-untyped-def]
        forward, backward = right.start(work, case)
        return forward, lambda outputs: backward(outputs) * 1.001

    with pytest.raises(RuntimeError, match="wrong is wrong"):
        bench.check_result(Method("wrong", start, "peer"), case, torch.empty_like(case.logits))


def test_it_runs_to_its_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "CHECKED", 3)
    options = argparse.Namespace(json=str(tmp_path / "report.json"), plot=None, check=False, growth=True)
    assert bench.run(options, 8, 64, 2, device="cpu", backend="eager") == 0
    written = json.loads((tmp_path / "report.json").read_text())
    assert set(written["growth"]) == {"T", "V", "TP"}
    assert set(written["results"]) == {"bfloat16", "float32"}
    for figures in written["results"].values():
        assert set(figures) == {m.name for m in METHODS}
