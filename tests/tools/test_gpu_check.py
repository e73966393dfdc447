"""The check of a card, without one: it goes on past what fails, keeps what was told, and runs each stage at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from tools.gpu_check import __main__ as command
from tools.gpu_check import head, host, kernels
from tools.gpu_check.facts import Fact, Facts, read_facts
from tools.gpu_check.report import Outcome, page, summary

STAGES = list(command.LIMITS)


def test_all_stages_fit_in_ten_minutes() -> None:
    assert sum(command.LIMITS.values()) < 600
    assert STAGES == ["smoke", "nccl", "kernels", "head", "host", "trainer"]


def test_a_stage_tells_what_is_wrong_what_is_missed_and_what_did_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "head.jsonl"
    facts = Facts("head", told)
    facts.tell("in_forward", 49.0, "ms", most=38.0)
    facts.tell("resident", 37.0, "ms", most=38.0)
    with facts.optional("a peer"):
        raise ImportError("wants a card\nand more")
    assert facts.right, "a missed figure and a peer that does not run are not wrong"
    with facts.required("recompute"):
        raise RuntimeError("relative errors 1")
    assert not facts.right
    with told.open("a") as file:
        file.write('{"stage": "he')  # it was stopped
    kept = read_facts(told)
    assert kept == facts.all and [fact.missed for fact in kept] == [True, False, False, False]
    assert capsys.readouterr().out.splitlines() == [
        "head     in_forward: 49 ms (≤ 38: missed)",
        "head     resident: 37 ms (≤ 38: met)",
        "head     a peer: not run: ImportError: wants a card",
        "head     recompute: WRONG: RuntimeError: relative errors 1",
    ]
    outcomes = [Outcome("head", "wrong", 3.0, tuple(kept))]
    assert summary(outcomes)[1:] == [kept[3].line, f"missed: {kept[0].line}"]
    assert "| in_forward | 49 ms | ≤ 38: missed |" in page(outcomes, "a card")


def run_stages(rank: int) -> list[tuple[str, bool, int]]:
    found = []
    for stage in (kernels, host):
        facts = Facts(stage.__name__)
        stage.run(facts, "cpu")
        found.append((stage.__name__, facts.right, len(facts.all)))
    return found


def test_stages_run_at_tiny_sizes_on_a_cpu() -> None:
    """The same code as on a card, which joins a world: not in this process; `--cpu` runs each stage in one of its own."""
    [found] = run_world(1, run_stages)
    for name, right, told in found:
        assert right and told >= 4, name


def test_a_stage_that_hangs_is_stopped_and_the_rest_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "LIMITS", {"smoke": 0.2, "absent": 60})
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert command.main(["--cpu", "--json", str(tmp_path / "facts.json")]) == 1
    written = json.loads((tmp_path / "facts.json").read_text())
    assert [one["ended"] for one in written["stages"]] == ["stopped", "failed (2)"]


def test_a_stage_that_raises_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "run", lambda facts, device: facts.tell("before", 1.0) or 1 / 0)
    assert not command.inside("head", tmp_path / "told", "cpu")
    assert read_facts(tmp_path / "told")[-1] == Fact(
        "head", "the stage itself", "ZeroDivisionError: division by zero", kind="wrong"
    )


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["heads"])
    assert "'heads' is no stage; choose of smoke, nccl" in capsys.readouterr().err


@pytest.mark.slow
def test_everything_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a minute: each stage imports torch anew, and the trainer starts twice."""
    pytest.importorskip("megatron.core")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert command.main(["--cpu", "--page", str(tmp_path / "page.md")]) == 0
    text = (tmp_path / "page.md").read_text()
    for stage in STAGES:
        assert f"| {stage} | right |" in text
    assert "| float32, on from its checkpoint | right |" in text
