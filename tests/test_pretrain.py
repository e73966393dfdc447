"""A loop in the style of Megatron-LM's, and what changes in it for GRPO and DPO."""

from __future__ import annotations

import difflib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from parallel_rl.testing.pool import preload, run_world
from tests.forked import run_ranks
from tests.training.helpers import ROOT

preload("parallel_rl.megatron")
FOLDER = ROOT / "examples" / "pretrain"


def _train(rank: int, tp: int) -> list[list[dict[str, float]]]:
    """The logs of each of the three loops."""
    from megatron.core import num_microbatches_calculator as calculator

    from parallel_rl import megatron as m

    m.enable_cpu()
    logs = []
    for name in ("gpt", "gpt_grpo", "gpt_dpo"):
        calculator.unset_num_microbatches_calculator()
        logs.append(runpy.run_path(str(FOLDER / f"{name}.py"))["train"](tp))
    calculator.unset_num_microbatches_calculator()
    m.destroy()
    return logs


@pytest.mark.slow
def test_the_loops_log_and_train_alike_on_any_layout() -> None:
    """Losses, further metrics and Megatron's own gradient norm of three steps, on TP 2 × DP 2 as on one rank."""
    pytest.importorskip("megatron.core")
    [alone] = run_world(1, _train, 1)
    for found in run_world(4, _train, 2):
        for logs, of_one in zip(found, alone, strict=True):
            for row, want in zip(logs, of_one, strict=True):
                assert row == pytest.approx(want, rel=1e-4, abs=1e-6)
    text, grpo, dpo = alone
    assert text[0]["loss"] == pytest.approx(4.2, abs=0.3)
    assert dpo[0]["loss"] != grpo[0]["loss"] and "accuracy" in dpo[0]
    assert all(row["gradient norm"] > 0 for logs in alone for row in logs)


def _as_script(words: list[str]) -> None:
    """Run a file and its arguments as torchrun does on each rank."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.slow
def test_the_command_of_the_file_runs_as_it_stands(tmp_path: Path) -> None:
    """What lies under `__main__` too, alike in each file, which on a CPU machine ended in an assertion of torch.cuda."""
    pytest.importorskip("megatron.core")
    texts = {name: (FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in ("gpt", "gpt_grpo", "gpt_dpo")}
    commands = {
        re.findall(r"torchrun (.*)$", text, re.M)[0].replace(f"/{name}.py", "/FILE") for name, text in texts.items()
    }
    [command], [_] = commands, {text.split("__main__")[1] for text in texts.values()}
    option, ranks, *words = shlex.split(command.replace("FILE", "gpt_grpo.py"))
    assert option == "--nproc-per-node"
    done = run_ranks(tmp_path, _as_script, words, ranks=int(ranks))
    assert done.statuses == [0, 0], done.stderr
    assert len(re.findall(r"^loss \d.* gradient norm \d", done.stdout, re.M)) == 3


def _difference(name: str) -> list[str]:
    before, after = ((FOLDER / f"{each}.py").read_text(encoding="utf-8").splitlines() for each in ("gpt", name))
    return list(difflib.unified_diff(before, after, "gpt.py", f"{name}.py", lineterm="", n=1))


@pytest.mark.parametrize("name", ["gpt_grpo", "gpt_dpo"])
def test_fewer_than_forty_lines_change_and_the_page_shows_them(name: str) -> None:
    """Removed and added lines alike, but for empty ones."""
    lines = _difference(name)
    changed = [line for line in lines[2:] if line[0] in "+-" and line[1:].strip()]
    page = (ROOT / "docs" / "pretrain.md").read_text(encoding="utf-8")
    assert len(changed) < 40
    assert f"{len(changed)} lines" in page
    if name == "gpt_grpo":
        [shown] = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
        assert shown.splitlines() == lines
