"""The benchmarks measure what they say; no test here looks at a clock."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import packing, token_stats
from benchmarks.common import PeakMemory, Seconds, return_freed_memory, run_ranks
from benchmarks.vocab_case import make_case
from tests.distributed.pool import run_world

OURS, FUSED, EAGER = (token_stats.METHODS[i] for i in (0, 2, 5))


def _results(fused_both: float = 2.0) -> dict[str, dict[str, token_stats.Figures]]:
    """Peers take twice our time; `fused_both` is of Megatron's fused cross-entropy, in bfloat16 only."""
    peer = token_stats.Figures(Seconds(2.0, 2.0), Seconds(2.0, 2.0), 4.0, 6.0, 0.0, 0.0)
    ours = token_stats.Figures(Seconds(1.0, 1.0), Seconds(1.0, 1.0), 0.01, 0.01, 0.0, 0.0)
    figures = {m.name: ours if m.kind == "ours" else peer for m in token_stats.METHODS}
    fused = dataclasses.replace(peer, both=Seconds(fused_both, fused_both))
    return {"float32": figures, "bfloat16": {**figures, FUSED.name: fused}}


def test_token_stats_tells_which_figure_is_missed() -> None:
    assert token_stats.missed(_results()) == []
    (line,) = token_stats.missed(_results(fused_both=0.9))
    assert "bfloat16" in line and FUSED.name in line and "both" in line
    results = _results()
    results["float32"][OURS.name] = dataclasses.replace(results["float32"][OURS.name], both_bytes=0.2)
    (line,) = token_stats.missed(results)
    assert "float32" in line and "0.20 bytes" in line


def test_packing_tells_which_figure_is_missed() -> None:
    rows = [packing.Figures(n, Seconds(1.0, 1.0), 100) for n in packing.SEQUENCES]
    assert packing.missed({"token": rows}) == []
    rows[2] = packing.Figures(256, Seconds(1.4, 1.4), 101)
    assert len(packing.missed({"token": rows})) == 2


def _off_by_a_little(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return (EAGER.forward(logits, targets)[0] * 1.001,)


def _check(rank: int, wrong: bool) -> tuple[float, float]:
    method = token_stats.Method("wrong", _off_by_a_little, "peer") if wrong else EAGER
    case = make_case(rank, tokens=48, vocab=64, tp=2, dtype=torch.float32)
    return token_stats.check_result(method, case, torch.empty_like(case.logits))


def test_a_wrong_method_is_not_timed() -> None:
    for errors in run_world(2, _check, False):
        assert max(errors) < 1e-5
    with pytest.raises(Exception, match="wrong is wrong"):
        run_world(2, _check, True)


def _peak(rank: int) -> tuple[int, int]:
    return_freed_memory()
    peak = PeakMemory()
    block = torch.ones(1 << 22)  # 16 MiB
    alive = peak()
    del block
    return alive, PeakMemory()()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count of peak memory")
def test_peak_memory_sees_an_allocation_once() -> None:
    ((alive, afterwards),) = run_ranks(1, _peak)  # a process of its own: the allocator stays changed
    assert 15 << 20 <= alive <= 18 << 20
    assert afterwards <= 1 << 20


def test_packing_operators_do_not_grow(tmp_path: Path) -> None:
    report = tmp_path / "packing.json"
    assert packing.main(["--tokens", "512", "--vocab", "8", "--repeats", "1", "--json", str(report)]) == 0
    for rows in json.loads(report.read_text())["results"].values():
        assert [row["sequences"] for row in rows] == list(packing.SEQUENCES)
        assert len({row["operators"] for row in rows}) == 1


@pytest.mark.slow
def test_token_stats_runs_to_its_report(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    report = tmp_path / "stats.json"
    assert token_stats.main(["--tokens", "64", "--vocab", "256", "--repeats", "1", "--json", str(report)]) == 0
    written = json.loads(report.read_text())
    assert set(written["results"]) == {"float32", "bfloat16"}
    for figures in written["results"].values():
        assert set(figures) == {m.name for m in token_stats.METHODS}
