"""The examples run as they stand, and show what they promise."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

from parallel_rl.testing.pool import preload, run_world
from tests.training.helpers import ROOT

preload("parallel_rl.megatron")


def train(rank: int, name: str, *arguments: int) -> list[float]:
    """What an example's `train` returns in the present world."""
    found: list[float] = runpy.run_path(str(ROOT / "examples" / name))["train"](*arguments)
    return found


@pytest.mark.slow  # three processes import torch; the same numbers on two ranks of the pool: test_readme
def test_a_loss_on_two_ranks_is_that_of_one() -> None:
    done = subprocess.run([sys.executable, "examples/grpo_loss_two_ranks.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loss and gradients equal those of one process" in done.stdout


def test_the_megatron_loop_has_the_same_losses_on_any_layout() -> None:
    pytest.importorskip("megatron.core")
    [losses] = run_world(1, train, "megatron_loop.py", 1, 1)
    assert losses[-1] < losses[0]
    for found in run_world(4, train, "megatron_loop.py", 2, 2):
        assert found == pytest.approx(losses, rel=1e-4)


def test_megatron_grpo_draws_and_rewards_the_same_on_any_layout() -> None:
    pytest.importorskip("megatron.core")
    [alone] = run_world(1, train, "megatron_grpo.py", 1, 1, 3)
    for found in run_world(4, train, "megatron_grpo.py", 2, 2, 3):
        assert found == pytest.approx(alone, abs=0.02)  # the same draws, but for float32 sums that break a tie


@pytest.mark.slow
def test_the_reward_of_megatron_grpo_rises() -> None:
    """25 steps on four ranks, which sample without a cache, are needed to learn the digits."""
    pytest.importorskip("megatron.core")
    for found in run_world(4, train, "megatron_grpo.py", 2, 2, 25):
        assert sum(found[:3]) / 3 < 0.2 and sum(found[-3:]) / 3 > 0.6


def test_megatron_grpo_is_short() -> None:
    assert len((ROOT / "examples" / "megatron_grpo.py").read_text(encoding="utf-8").splitlines()) <= 150
