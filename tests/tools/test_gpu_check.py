"""The check of a card, without one: it goes on past what fails, keeps what was told, and runs each stage at tiny sizes."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import linear_methods, peers, token_stats_gpu_methods
from parallel_rl.testing.pool import run_world
from tests.launch import UNCOMPILED
from tools.gpu_check import __main__ as command
from tools.gpu_check import head, host, kernels, smoke, trainer
from tools.gpu_check.facts import Fact, Facts, read_facts
from tools.gpu_check.report import Outcome, page, summary

STAGES = list(command.LIMITS)
MARK = re.compile(r"^(pytestmark = |@)pytest\.mark\.gpu\b", re.MULTILINE)


def test_all_stages_fit_in_ten_minutes() -> None:
    """Also where each is stopped and takes all its grace."""
    assert sum(limit + command.GRACE for limit in command.LIMITS.values()) < 600
    assert STAGES == ["smoke", "nccl", "kernels", "head", "host", "trainer"]


def test_the_files_that_need_a_card_are_named() -> None:
    """Whole folders are 3377 tests, which each of the processes would collect first."""
    root = Path(__file__).parents[2]
    told = re.search(r"pytest -n 8 -m gpu ([^`]*)`", (root / "benchmarks" / "README.md").read_text())
    marked = [file for file in sorted(root.glob("tests/**/test_*.py")) if MARK.search(file.read_text())]
    assert told is not None and sorted(told[1].split()) == [str(file.relative_to(root)) for file in marked]


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
    printed = capsys.readouterr()
    assert 'raise RuntimeError("relative errors 1")' in printed.err, "where it failed, which a card may not show again"
    assert printed.out.splitlines() == [
        "head     in_forward: 49 ms (≤ 38: missed)",
        "head     resident: 37 ms (≤ 38: met)",
        "head     a peer: not run: ImportError: wants a card",
        "head     recompute: WRONG: RuntimeError: relative errors 1",
    ]
    outcomes = [Outcome("head", "wrong", 3.0, tuple(kept))]
    assert summary(outcomes)[1:] == [kept[3].line, f"missed: {kept[0].line}"]
    assert "| in_forward | 49 ms | ≤ 38: missed |" in page(outcomes, "a card")


def run_stage(rank: int, name: str) -> tuple[bool, int]:
    """Run a stage eagerly on the host; return whether its checks passed, and how many facts it has."""
    facts = Facts(name)
    with torch.compiler.set_stance("force_eager"):
        importlib.import_module(f"tools.gpu_check.{name}").run(facts, "cpu")
    return facts.right, len(facts.all)


@pytest.mark.parametrize("name", ["kernels", "host", pytest.param("head", marks=pytest.mark.slow)])
def test_a_stage_runs_at_tiny_sizes_on_a_cpu(name: str) -> None:
    """The same code as on a card, which joins a world: not in this process; `--cpu` runs each stage in one of its own."""
    [(right, facts)] = run_world(1, run_stage, name)
    assert right and facts >= 4


@pytest.mark.slow
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


def _refuse(*_: object) -> None:
    raise RuntimeError("not here")


def test_the_statistics_and_the_head_are_checked_without_any_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes a minute to import would leave the most important stage no time."""
    for module in (linear_methods, token_stats_gpu_methods):
        monkeypatch.setattr(module, "peers", _refuse)
    facts = Facts("smoke")
    smoke._statistics(facts, "cpu", 128)
    smoke._head(facts, "cpu")
    assert facts.right and len(facts.all) == 2 * 2 + 2 * 4


def test_what_the_machine_can_do_is_told_before_its_compiler_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes as long as all kernels: where the stage is stopped meanwhile, the ceilings were lost."""
    for name in ("describe", "_statistics", "_head", "_truncated"):
        monkeypatch.setattr(smoke, name, lambda *_: None)
    monkeypatch.setattr(smoke, "compiler_works", lambda _: sys.exit("stopped"))
    facts = Facts("smoke")
    with pytest.raises(SystemExit):
        smoke.run(facts, "cpu")
    assert [fact.name for fact in facts.all] == ["copy", "matrix product, bfloat16", "matrix product, float32"]


class LargestOnHost(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        of_host = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
        self.numbers = max([self.numbers, *of_host])
        return out


@pytest.mark.parametrize("kind", ["logits", "hidden states"])
def test_a_loss_gets_what_it_reads_drawn_on_the_device(kind: str) -> None:
    """A billion logits drawn by one thread of the host, and moved, are ten seconds of 35."""
    with LargestOnHost() as seen:
        host._call(kind, 64, 512, 32, "meta")
    assert seen.numbers <= 64


def test_a_cut_or_a_profiler_that_fails_takes_no_other_time_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other cuts' times were lost with the first one's, and all shapes' with CUPTI, which a container may lack."""
    measure = kernels.measure
    failing = [True, False]
    cut = ("stats", kernels.Cut(256, 4, 32))
    monkeypatch.setattr(kernels, "measure", lambda *a, **k: _refuse() if failing.pop(0) else measure(*a, **k))
    monkeypatch.setattr(kernels, "_cuts", lambda *_: [None, cut])
    monkeypatch.setattr(kernels, "_applied", lambda _: nullcontext())
    monkeypatch.setattr(kernels, "kernel_table", _refuse)
    facts = Facts("kernels")
    kernels._shape(facts, 24, 512, torch.float32, "eager", 1.0)
    assert [fact.kind for fact in facts.all] == ["wrong", "fact", "not run"]
    assert str(cut) in facts.all[1].name and facts.all[2].value == "RuntimeError: not here"


@pytest.mark.parametrize("stage", [kernels, pytest.param(head, marks=pytest.mark.slow)])
def test_a_peer_that_cannot_be_imported_is_a_fact(stage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a line on the screen alone; and the head's stage goes on where the profiler fails."""
    monkeypatch.setattr(peers, "_broken", {"absent.peer": "ImportError: wants libcuda.so.1"})
    for name in ("methods", "join_megatron", "kernel_table"):
        monkeypatch.setattr(stage, name, (lambda *_: []) if name == "methods" else _refuse)
    facts = Facts("stage")
    if stage is kernels:
        kernels._peers(facts, 24, 512, torch.float32, "eager")
    else:
        with torch.compiler.set_stance("force_eager"):
            head.run(facts, "cpu")
    assert Fact("stage", "absent.peer", "ImportError: wants libcuda.so.1", kind="not run") in facts.all and facts.right
    assert sum(fact.name.endswith(", by kernel") and fact.kind == "not run" for fact in facts.all) == (
        4 if stage is head else 0
    )


class Trainer:
    """In place of the trainer's process: writes the rows that it would write, and keeps how it was called."""

    def __init__(self, resumes: bool) -> None:
        self.resumes, self.starts, self.cards = resumes, 0, []

    def __call__(self, limit: float, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        self.starts += 1
        self.cards.append(environment["CUDA_VISIBLE_DEVICES"])
        given = dict(word.removeprefix("--").split("=", 1) for word in command if word.startswith("--") and "=" in word)
        folder, steps = Path(given["run.dir"]), int(given["rl.steps"])
        file = folder / "metrics.jsonl"
        folder.mkdir(exist_ok=True)
        done = file.read_text().splitlines() if self.resumes and file.exists() else []
        rows = [{"phase": "rl", "step": n + 1, "tokens_per_second": self.starts} for n in range(len(done), steps)]
        file.write_text("".join(f"{line}\n" for line in [*done, *map(json.dumps, rows)]))
        return 0, ""


@pytest.mark.parametrize("resumes", [True, False])
def test_a_run_that_starts_over_did_not_go_on_from_its_checkpoint(
    resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its RL steps are the same; that it resumed is in the rows of the run before, which have their own times."""
    monkeypatch.setattr(trainer, "ended_within", Trainer(resumes))
    facts = Facts("trainer")
    trainer.run(facts, "cpu")
    assert facts.right == resumes
    assert [fact.name for fact in facts.all if fact.kind == "wrong"] == [
        "float32, on from its checkpoint: it added a row to those of before"
    ] * (not resumes)


@pytest.mark.parametrize(("seen", "card"), [(None, "0"), ("2,3", "2"), ("GPU-8f2a", "GPU-8f2a"), ("", "")])
def test_each_run_sees_one_card(seen: str | None, card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks over gloo spread over the cards of a machine that has several, and what is told is of one."""
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    process = Trainer(resumes=True)
    monkeypatch.setattr(trainer, "ended_within", process)
    trainer.run(Facts("trainer"), "cuda")
    assert process.cards == [card] * 6


@pytest.mark.parametrize(
    ("then", "limit", "why"), [("exec sleep 60", 1.0, "not done after 1 s"), ("exit 1", 60.0, "a.PassingError: 7")]
)
def test_a_run_that_fails_shows_what_it_printed(
    then: str,
    limit: float,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A hang lost it all, and of a failure it told a line of code with "Error" in it."""
    process = tmp_path / "python"
    process.write_text(f"#!/bin/sh\necho '    raise PassingError(7)'\necho 'a.PassingError: 7'\n{then}\n")
    process.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(process))
    monkeypatch.setattr(trainer, "_LIMIT", limit)
    facts = Facts("trainer")
    trainer.run(facts, "cpu")
    assert [(fact.kind, fact.value) for fact in facts.all] == [("wrong", why)]
    assert "raise PassingError(7)" in capsys.readouterr().out


def test_the_runs_are_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang took the time of those after it; and a run is its start mostly, one after the other some minutes."""
    process, together = Trainer(resumes=True), threading.Barrier(5)

    def ended_within(*arguments: Any) -> tuple[int, str]:
        if process.starts < 5:
            together.wait(20)
        return process(*arguments)

    monkeypatch.setattr(trainer, "ended_within", ended_within)
    facts = Facts("trainer")
    trainer.run(facts, "cuda")
    assert facts.right and process.starts == 6


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["heads"])
    assert "'heads' is no stage; choose of smoke, nccl" in capsys.readouterr().err


@pytest.mark.slow
def test_stages_that_start_processes_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of gloo, and a trainer that starts twice; the stages of one process run above, smoke below."""
    pytest.importorskip("megatron.core")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for name, value in UNCOMPILED.items():
        monkeypatch.setenv(name, value)
    assert command.main(["--cpu", "--page", str(tmp_path / "page.md"), "nccl", "trainer"]) == 0
    text = (tmp_path / "page.md").read_text()
    for stage in ("nccl", "trainer"):
        assert f"| {stage} | right |" in text
    assert "| float32, on from its checkpoint: it added a row to those of before | right |" in text


_ENDED_AS_A_STAGE_STARTS = """
import os, runpy, signal, subprocess

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "kernels" in command:
            print("started", self.pid, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Popen
runpy.run_module("tools.gpu_check", run_name="__main__")
"""


@pytest.mark.slow
def test_a_check_that_is_ended_keeps_what_was_found_and_leaves_no_stage(tmp_path: Path) -> None:
    """A stage has a session of its own: it went on, on the card, if the signal came before its Popen object was there."""
    facts = tmp_path / "facts.json"
    check = subprocess.run(
        [sys.executable, "-c", _ENDED_AS_A_STAGE_STARTS, "--cpu", "--json", str(facts), "smoke", "kernels"],
        cwd=Path(__file__).parents[2], env={**os.environ, **UNCOMPILED}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert check.returncode == 1, check.stderr
    [stage] = re.findall(r"^started (\d+)$", check.stdout, re.MULTILINE)
    assert not psutil.pid_exists(int(stage))
    assert [(one["stage"], one["ended"]) for one in json.loads(facts.read_text())["stages"]] == [("smoke", "right")]
