"""The examples run as they stand, and show what they promise."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from torch import multiprocessing

from parallel_rl.testing.pool import preload, run_world
from tests.forked import run_ranks
from tests.training.helpers import ROOT, train_rows

preload("parallel_rl.megatron")


def train(rank: int, name: str, *arguments: int) -> list[float]:
    """What an example's `train` returns in the present world."""
    found: list[float] = runpy.run_path(str(ROOT / "examples" / name))["train"](*arguments)
    return found


def _two_ranks() -> None:
    """Run the example as a script whose ranks are forked: started by spawn, each of them imports torch."""
    multiprocessing.spawn = partial(multiprocessing.start_processes, start_method="fork")
    runpy.run_path(str(ROOT / "examples" / "grpo_loss_two_ranks.py"), run_name="__main__")


@pytest.mark.slow
def test_a_loss_on_two_ranks_is_that_of_one(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, _two_ranks, ranks=1)
    assert done.statuses == [0], done.stderr
    assert "loss and gradients equal those of one process" in done.stdout


@pytest.mark.slow
def test_the_megatron_loop_has_the_same_losses_on_any_layout() -> None:
    pytest.importorskip("megatron.core")
    [losses] = run_world(1, train, "megatron_loop.py", 1, 1)
    assert losses[-1] < losses[0]
    for found in run_world(4, train, "megatron_loop.py", 2, 2):
        assert found == pytest.approx(losses, rel=1e-4)


@pytest.fixture(scope="module")
def grpo_rewards() -> list[float]:
    """The mean rewards of 18 steps on one rank, which are needed to learn the digits."""
    pytest.importorskip("megatron.core")
    [rewards] = run_world(1, train, "megatron_grpo.py", 1, 1, 18, timeout=240)
    return rewards


@pytest.mark.slow
def test_megatron_grpo_draws_and_rewards_the_same_on_any_layout(grpo_rewards: list[float]) -> None:
    for found in run_world(4, train, "megatron_grpo.py", 2, 2, 2):
        assert found == pytest.approx(grpo_rewards[:2], abs=0.02)  # the same draws, but for sums that break a tie


@pytest.mark.slow
def test_the_reward_of_megatron_grpo_rises(grpo_rewards: list[float]) -> None:
    assert sum(grpo_rewards[:3]) / 3 < 0.2 and sum(grpo_rewards[-3:]) / 3 > 0.6


def train_and_export(rank: int, folder: str) -> list[dict[str, float | int | str]]:
    """A step of each phase of the demo's run from the folder that the demo makes, and a folder back."""
    from parallel_rl.training.checkpointing.export import export_checkpoint
    from parallel_rl.training.config.load import load_config

    model, run = f"{folder}/model", f"{folder}/grpo"
    files = {name: f"{folder}/{name}.jsonl" for name in ("train", "held_out")}
    data = {**files, "examples": f"{folder}/hasty.jsonl", "columns": {"prompt": "question"}}
    small = {"model": {"hf": model}, "tokenizer": {"hf": model}, "data": data, "parallel": {}, "evaluation": "null"}
    given = {**small, "warmup.steps": 1, "rl.steps": 1, "run.dir": run}
    del data["held_out"]
    overrides = [f"--{key}={value}" for key, value in given.items()]
    config = load_config(str(ROOT / "examples" / "word_problems" / "grpo.yaml"), overrides)
    rows = train_rows(rank, [str(ROOT / "examples" / "word_problems" / "grpo.yaml"), *overrides])
    export_checkpoint(Path(run) / "checkpoints" / "step_000002", Path(folder) / "trained", config)
    return rows


@pytest.mark.slow
def test_the_demo_of_a_folder_trains_and_gives_one_back(tmp_path: Path) -> None:
    """What is exported is a folder that the same run would begin with, with the tokenizer's files as they were."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    runpy.run_path(str(ROOT / "examples" / "word_problems" / "make.py"))["main"](tmp_path)
    [rows] = run_world(1, train_and_export, str(tmp_path))
    assert [row["phase"] for row in rows] == ["warmup", "rl"] and all(row["grad_norm"] for row in rows[:1])
    before, after = tmp_path / "model", tmp_path / "trained"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (after / name).read_bytes() == (before / name).read_bytes()
    assert (after / "config.json").exists() and list(after.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["make_arithmetic_data", "record_rollouts", "serve_policy"])
def test_help_is_shown_and_nothing_done(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It was taken for a file: one example worked for half a minute and wrote it, two ended in tracebacks."""
    pytest.importorskip("megatron.core")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0 and f"usage: {name}.py" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_megatron_grpo_is_short() -> None:
    assert len((ROOT / "examples" / "megatron_grpo.py").read_text(encoding="utf-8").splitlines()) <= 150
