"""`benchmarks.linear` measures what it says, and says which target is missed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import linear
from benchmarks.common import Seconds
from benchmarks.linear_case import Case, Layout, Shape, grpo, make_case, weighted
from benchmarks.linear_methods import Method, methods
from benchmarks.peers import join_megatron
from parallel_rl.testing.pool import WorldError, preload, run_world

preload("megatron.core")

SHAPE = Shape(48, 96, 16)


@contextmanager
def _megatron(tp: int) -> Iterator[None]:
    from megatron.core import parallel_state

    join_megatron(tp)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _eager(tp: int) -> list[Method]:
    """Those that compile nothing."""
    compiled = ("compile", "fused", "token_stats")
    return [m for m in methods("cpu", 1 << 14, tp) if not any(word in m.name for word in compiled)]


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
    at_length = {m.name: linear.Figures(Seconds(0.04, 0.04), 4 * 10**9, errors) for m in chosen}
    assert linear.missed(at_length, chosen, "cuda") == [], "the milliseconds are an H200's"
    lines = linear.missed(at_length, chosen, "cuda", on_h200=True)
    assert [line.split(" takes")[0] for line in lines] == [ours, ours, again, chosen[2].name]


def test_a_card_s_goals_are_of_one_card_and_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = linear.Shape(8192, 131072, 4096)
    for card, of in (("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", False)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda card=card: card)
        assert linear._has_goals(shape, "bfloat16", None) == of
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    others = (shape._replace(tokens=4096), "bfloat16", None), (shape, "float32", None), (shape, "bfloat16", 1 << 30)
    assert not any(linear._has_goals(*other) for other in others)


def _errors(rank: int, sequence_parallel: bool) -> dict[str, tuple[float, ...]]:
    case = make_case(SHAPE, torch.float32, "cpu", Layout(2, sequence_parallel).part(rank))
    assert len(case.hidden) == (24 if sequence_parallel else 48) and len(case.weight) == 48
    with _megatron(2):
        return {m.name: linear.check_result(m, case) for m in _eager(2)}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_methods_are_right_on_two_ranks(sequence_parallel: bool) -> None:
    pytest.importorskip("megatron.core")
    for errors in run_world(2, _errors, sequence_parallel):
        assert "ours, in_forward, GRPO" in errors and "matmul + Megatron cross-entropy" in errors
        assert max(max(row) for row in errors.values()) < 1e-5


def _forgets(rank: int, sequence_parallel: bool) -> None:
    part = Layout(2, sequence_parallel).part(rank)
    case = make_case(SHAPE, torch.float32, "cpu", part)

    def of_one_rank(hidden: Tensor, weight: Tensor, case: Case) -> Tensor:
        loss = _eager(2)[0].run(hidden, weight, case)
        return loss if rank == 0 else loss - hidden.sum() + hidden.sum().detach()  # rank 1's hidden gradient is off

    linear.check_result(Method("of one rank", of_one_rank, "peer"), case)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_method_that_is_wrong_on_one_rank_is_not_timed(sequence_parallel: bool) -> None:
    with pytest.raises(WorldError, match="of one rank is wrong"):
        run_world(2, _forgets, sequence_parallel)


def test_figures_are_of_the_average_process_and_of_the_worst() -> None:
    first = linear.Figures(Seconds(1.0, 2.0), 10, (1e-3, 1e-5, 0.0))
    second = linear.Figures(Seconds(2.0, 4.0), 30, (1e-4, 1e-4, 1e-7))
    assert linear.over_ranks([first, second]) == linear.Figures(Seconds(1.5, 3.0), 30, (1e-3, 1e-4, 1e-7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab", "66", "--tp", "4"], "--vocab, and with --sequence-parallel --tokens, must be divisible by 4"),
        (["--tokens", "66", "--tp", "4", "--sequence-parallel"], "must be divisible by 4"),
        (["--vocab", "260", "--tp", "2", "--growth"], "must be divisible by 8"),
        (["--device", "cuda", "--tp", "2"], "--tp is of processes on a CPU"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        linear.main(["--device", "cpu", *options])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_every_method_that_runs_here_is_right() -> None:
    case = make_case(SHAPE, torch.float32, "cpu")
    for method in methods("cpu", 1 << 14):
        if "Megatron" not in method.name:  # it wants its groups
            assert max(linear.check_result(method, case)) < 1e-5


def test_a_wrong_method_is_not_timed() -> None:
    case = make_case(SHAPE, torch.float32, "cpu")
    for objective in (weighted, grpo):
        right = next(m for m in methods("cpu", None) if m.objective is objective)

        def wrong(hidden: Tensor, weight: Tensor, case: Case, right: Method = right) -> Tensor:
            return right.run(hidden, weight, case) * 1.001

        with pytest.raises(RuntimeError, match="off is wrong"):
            linear.check_result(Method("off", wrong, "peer", objective), case)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_it_runs_to_its_report_on_two_ranks(tmp_path: Path) -> None:
    """Takes a quarter of a minute: two processes import torch, Megatron and the peers."""
    pytest.importorskip("megatron.core")
    target = tmp_path / "linear.json"
    sizes = ["--tokens", "64", "--vocab", "256", "--hidden", "16", "--repeats", "1"]
    layout = ["--tp", "2", "--sequence-parallel"]
    assert linear.main([*sizes, *layout, "--device", "cpu", "--json", str(target)]) == 0
    written = json.loads(target.read_text())
    assert written["options"]["TP"] == 2 and written["options"]["sequence parallel"]
    assert set(written["results"]) == {m.name for m in methods("cpu", None, 2)}


def test_what_grows() -> None:
    shape = Shape(64, 256, 16)
    points = linear.growth_points(shape, Layout(2, True), "cpu")
    assert [(axis, n, tp) for axis, n, _, tp in points] == [
        *(("T", n, 2) for n in (16, 32, 64)), *(("V", n, 2) for n in (64, 128, 256)), *(("D", n, 2) for n in (4, 8, 16)),
        *(("TP", n, n) for n in (1, 2, 4)),
    ]  # fmt: skip
    for axis, n, at, _ in points:
        assert at == (
            shape if axis == "TP" else shape._replace(**{{"T": "tokens", "V": "vocab", "D": "hidden"}[axis]: n})
        )
    assert "TP" not in {axis for axis, *_ in linear.growth_points(shape, Layout(1, False), "cuda")}
