"""The plan as one reads it: bounds that bound, a recommendation that fits, a command that refuses what it cannot read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_rl.cli import main
from parallel_rl.plan.bounds import CARDS, bounds, loss_stage_seconds
from parallel_rl.plan.memory import Layout
from parallel_rl.plan.models import ModelShape
from parallel_rl.plan.report import plan_run
from parallel_rl.training.config.load import load_config
from parallel_rl.training.preflight.model_shape import model_shape
from tests.plan.test_models import LLAMA

ROOT = Path(__file__).parents[2]
MODEL = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)


@pytest.mark.parametrize(
    ("tokens", "vocab", "hidden", "milliseconds"),
    [(8192, 131072, 4096, 50.2), (32768, 131072, 4096, 211.0)],
)
def test_no_published_head_is_faster_than_its_bound(tokens: int, vocab: int, hidden: int, milliseconds: float) -> None:
    """Liger's fused head on an H100, forward and backward with logits projected again: at 70 to 75 % of the bound."""
    bound = 1e3 * loss_stage_seconds(hidden, vocab, Layout(tokens), CARDS["H100"], "recompute")
    assert 0.6 * milliseconds < bound < milliseconds


def test_bounds_over_the_ranks() -> None:
    """Tokens grow with the data ranks, compute does not; gradients travel over the network once the job leaves its node."""
    found = list(bounds(MODEL, Layout(8192, tensor=8, sequence_parallel=True), CARDS["H100"], micro_batches=4))
    assert found[0].ranks == 8 and found[-1].ranks == 8192
    assert {bound.compute for bound in found} == {found[0].compute}
    assert found[0].gradient_collective == 0 < found[1].gradient_collective < found[-1].gradient_collective
    assert [bound.tokens for bound in found] == [8192 * 4 * bound.data for bound in found]
    assert all(bound.step == max(bound[3:]) for bound in found)


def test_the_recommended_mode_fits_and_is_the_leanest_of_the_fast() -> None:
    """Little room takes the head's chunks; none says so; a loss that is no sum over tokens never gets in_forward."""
    plan = plan_run(MODEL, Layout(65536, tensor=8, data=8), "H100")
    best, other = plan.recommended(), plan.recommended(separable=False)
    assert best is not None and best.mode == "in_forward" and plan.fits(best)
    assert other is not None and other.mode != "in_forward"
    tight = replace(plan, memory=plan.state_bytes + other.bytes - 1)
    again = tight.recommended(separable=False)
    assert again is not None and again.mode == "recompute"
    assert replace(plan, memory=plan.state_bytes).recommended() is None


def test_a_config_of_train_has_its_models_sizes() -> None:
    """As many weights as the model of the demo has: 2 layers of 64, 16 words with the table of positions."""
    shape = model_shape(load_config(str(ROOT / "configs/grpo_arithmetic.yaml")))
    layer = 4 * 64 * 64 + 2 * 64 * 256 + 2 * 64
    assert shape.parameters == 2 * layer + 2 * 16 * 64 + 64 * 64 + 64


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a mode, the same numbers as JSON, a picture; exit 1 where nothing fits."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    arguments = ["plan", str(tmp_path), "--tokens", "8192", "--tensor", "8", "--data", "4"]
    picture = tmp_path / "plan.png"
    assert main([*arguments, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "in_forward" in out and "lower bounds of a step" in out and picture.read_bytes()[:4] == b"\x89PNG"
    assert main([*arguments, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["loss_stage"]["recompute"]["fits"] and tree["bounds"][0]["ranks"] == 8
    assert main([*arguments, "--memory", "8"]) == 1
    assert "any other loss: nothing fits" in capsys.readouterr().out
    assert main(["plan", str(ROOT / "configs/grpo_arithmetic.yaml"), "--tokens", "4096", "--dtype", "float32"]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tensor", "3"], "heads = 32 is not divisible by 3 ranks"),
        (["--card", "H900"], "card = 'H900' is not known; choose one of A100, H100, H200, B200"),
        (["--memory", "-1"], "--memory -1.0 must be a positive number of GiB"),
        (["--micro-batches", "0"], "micro_batches = 0 must be at least 1"),
        (["--budget", "10"], "budget = 10 bytes is too small for one row"),
        (["--context", "3"], "tokens = 8192 is not divisible by the 3 ranks"),
        (["--expert", "3"], "'--expert' is not an argument of `parallel-rl plan`"),
        (["--plot", "nowhere/plan.png"], "No such file or directory"),
        (["--plot", "plan.xyz"], "is not supported"),
    ],
)
def test_bad_input_is_named(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert main(["plan", str(tmp_path), "--tokens", "8192", *more]) == 2
    assert message in capsys.readouterr().err
