"""The benchmarks measure what they say; no test here looks at a clock."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import (
    losses,
    losses_case,
    token_stats,
    token_stats_methods,
    truncation,
    truncation_case,
    truncation_methods,
)
from benchmarks.common import PeakMemory, Seconds, return_freed_memory
from benchmarks.vocab_case import make_case
from parallel_rl import count_valid
from parallel_rl.testing.pool import run_world

EAGER = "ours, eager, in place"


@cache
def _methods() -> dict[str, token_stats_methods.Method]:
    """List them by name; it imports every peer that is installed."""
    return {m.name: m for m in token_stats_methods.methods(tp=1)}


def _results(gathered_both: float = 2.0) -> dict[str, dict[str, token_stats.Figures]]:
    """Peers take twice our time; `gathered_both` is of the gathered log-softmax, in bfloat16 only."""
    peer = token_stats.Figures(Seconds(2.0, 2.0), Seconds(2.0, 2.0), 4.0, 6.0, 0.0, 0.0)
    ours = token_stats.Figures(Seconds(1.0, 1.0), Seconds(1.0, 1.0), 0.01, 0.01, 0.0, 0.0)
    figures = {m.name: ours if m.kind == "ours" else peer for m in _methods().values()}
    gathered = dataclasses.replace(peer, both=Seconds(gathered_both, gathered_both))
    return {"float32": figures, "bfloat16": {**figures, token_stats_methods.GATHERED: gathered}}


def test_token_stats_tells_which_figure_is_missed() -> None:
    assert token_stats.missed(_results()) == []
    (line,) = token_stats.missed(_results(gathered_both=0.9))
    assert "bfloat16" in line and token_stats_methods.GATHERED in line and "both" in line
    results = _results()
    ours = token_stats_methods.OURS
    results["float32"][ours] = dataclasses.replace(results["float32"][ours], both_bytes=0.2)
    (line,) = token_stats.missed(results)
    assert "float32" in line and "0.20 bytes" in line


def test_losses_tells_which_figure_is_missed() -> None:
    rows = [losses.Figures(n, Seconds(1.0, 1.0), 100) for n in losses.SEQUENCES]
    whole = {name: losses.Whole(Seconds(2.0, 2.0), 4.0) for name in (losses.EAGER, losses.COMPILED)}
    whole[losses.OURS] = losses.Whole(Seconds(1.0, 1.0), 0.01)
    sequences = {losses.STATISTICS: rows, "GRPO": list(rows)}
    assert losses.missed(sequences, whole) == losses.missed(sequences, whole, "cuda") == []
    whole[losses.OURS] = losses.Whole(Seconds(2.5, 2.5), 0.2)
    sequences["GRPO"][2] = losses.Figures(256, Seconds(1.4, 1.4), 101)
    assert len(losses.missed(sequences, whole)) == 5
    assert "400.00 ms beyond the statistics" in losses.missed(sequences, whole, "cuda")[-1]


def test_truncation_tells_which_figure_is_missed() -> None:
    def figures(seconds: float, extra: float) -> truncation.Figures:
        return truncation.Figures(Seconds(seconds, seconds), Seconds(seconds, seconds), extra, 0.0, 0.0)

    rows = {m.name: figures(1.0 if m.kind == "ours" else 2.0, 0.01) for m in truncation_methods.METHODS}
    assert truncation.missed({"float32": {"top-k 50": rows}}) == []
    rows["gather, then sort"] = figures(0.9, 5.0)
    rows[truncation_methods.OURS] = figures(1.0, 0.2)
    lines = truncation.missed({"bfloat16": {"top-k 50": rows}})
    assert len(lines) == 3 and all(line.startswith("bfloat16, top-k 50: ") for line in lines)


def _off_by_a_little(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return (_methods()[EAGER].forward(logits, targets)[0] * 1.001,)


def _check(rank: int, wrong: bool) -> tuple[float, float]:
    method = token_stats_methods.Method("wrong", _off_by_a_little, "peer") if wrong else _methods()[EAGER]
    case = make_case(rank, tokens=48, vocab=64, tp=2, dtype=torch.float32)
    return token_stats.check_result(method, case, torch.empty_like(case.logits))


def test_a_wrong_method_is_not_timed() -> None:
    for errors in run_world(2, _check, False):
        assert max(errors) < 1e-5
    with pytest.raises(Exception, match="wrong is wrong"):
        run_world(2, _check, True)


def _peaks(answer: Connection) -> None:
    return_freed_memory()
    for _ in range(2):  # the first loads code, too
        peak = PeakMemory()
        block = torch.ones(1 << 22)  # 16 MiB
        alive = peak()
        del block
    answer.send((alive, PeakMemory()()))


def _nothing(rank: int) -> None:
    pass


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count of peak memory")
def test_peak_memory_sees_an_allocation_once() -> None:
    run_world(1, _nothing)  # starts the pool's server, from which the process below is forked
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_peaks, args=(theirs,))  # of its own: the allocator stays changed
    process.start()
    alive, afterwards = ours.recv()
    process.join()
    assert 15 << 20 <= alive <= 18 << 20
    assert afterwards <= 1 << 20


@pytest.mark.slow
def test_the_operators_of_a_loss_do_not_grow(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"losses.{name}" for name in ("json", "png")}
    arguments = ["--device", "cpu", "--tokens", "512", "--vocab", "8", "--repeats", "1", "--whole-tokens", "0"]
    assert losses.main([*arguments, "--json", str(files["json"]), "--plot", str(files["png"])]) == 0
    written = json.loads(files["json"].read_text())
    for rows in written["results"]["sequences"].values():
        assert [row["sequences"] for row in rows] == list(losses.SEQUENCES)
        assert len({row["operators"] for row in rows}) == 1
    assert set(written["growth"]["sequences"]) == {losses.STATISTICS, *losses_case.LOSSES}
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_plain_grpo_is_the_loss_that_it_is_measured_beside() -> None:
    data = losses_case.make_data(512, 50, 16)
    logits, counts = losses_case.make_logits(data, 50).requires_grad_(), count_valid([data])
    plain, entropy = losses_case.plain_grpo(logits, data, counts.toks)
    loss, metrics = losses_case.LOSSES["GRPO"]()(logits, data, *counts)
    torch.testing.assert_close(entropy, metrics["entropy"].float())
    results = [(x.detach(), torch.autograd.grad(x, logits)[0]) for x in (loss, plain)]
    losses_case.agree("plain", *results)
    with pytest.raises(RuntimeError, match="plain is wrong"):
        losses_case.agree("plain", (results[0][0] * 1.001, results[0][1]), results[1])


def _kept_by_peers(rank: int) -> list[tuple[Tensor, Tensor]]:
    case = truncation_case.make_case(rank, tokens=32, vocab=1024, tp=2, dtype=torch.bfloat16)
    work = torch.empty_like(case.logits)
    return [
        truncation.check_result(method, rule, case, work)
        for method in truncation_methods.METHODS
        for rule in truncation_case.RULES
    ]


def test_truncation_compares_methods_that_agree() -> None:
    for errors in run_world(2, _kept_by_peers, timeout=300):
        assert len(errors) == len(truncation_methods.METHODS) * len(truncation_case.RULES)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_token_stats_runs_to_its_report(tmp_path: Path) -> None:
    """Takes twenty seconds: two processes import torch, Megatron and the peers."""
    pytest.importorskip("megatron.core")
    report = tmp_path / "stats.json"
    sizes = ["--tokens", "64", "--vocab", "256", "--repeats", "1"]
    assert token_stats.main([*sizes, "--device", "cpu", "--json", str(report)]) == 0
    written = json.loads(report.read_text())
    assert set(written["results"]) == {"float32", "bfloat16"}
    for figures in written["results"].values():
        assert set(figures) == {m.name for m in token_stats_methods.methods(tp=2)}
