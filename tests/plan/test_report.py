"""The plan as one reads it: bounds that bound, a recommendation that fits, a command that refuses what it cannot read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_rl.cli import main
from parallel_rl.plan.memory import Layout
from parallel_rl.plan.report import CARDS, bounds, loss_stage_seconds, plan_run
from parallel_rl.plan.source import ModelShape
from parallel_rl.training.preflight.facts import planned
from tests.plan.test_source import LLAMA, MEGATRON

GRPO = Path(__file__).parents[2] / "configs/grpo_arithmetic.yaml"
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
    shape = planned(str(GRPO)).shape
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
    assert main(["plan", str(GRPO), "--tokens", "4096", "--dtype", "float32"]) == 0


def test_a_config_has_its_own_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TP 2 × CP 2 with sequence parallelism in float32 are the config's; a flag goes before; what was taken is said."""
    arguments = ["plan", str(GRPO), "--tokens", "4096"]
    assert main(arguments) == 0
    taken, layout = capsys.readouterr().out.splitlines()[:2]
    names = "tensor, context, pipeline, sequence_parallel, distributed_optimizer, dtype"
    assert taken == f"taken from {GRPO}: {names}"
    assert layout == "layout: tensor 2, context 2, pipeline 1, data 1, sequence parallel, float32, whole optimizer"
    assert main([*arguments, "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    flags = ["--tensor", "1", "--no-sequence-parallel", "--dtype", "bfloat16", "--no-whole-optimizer", "--data", "2"]
    assert main([*arguments, *flags, "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert own["layout"]["tensor"] == 2 and own["bounds"][0]["ranks"] == 4
    assert other["layout"]["tensor"] == 1 and other["layout"]["context"] == 2 and other["layout"]["data"] == 2
    assert not other["layout"]["sequence_parallel"] and other["layout"]["dtype"] == "bfloat16"
    assert other["layout_of_model"] == ["context", "pipeline"]
    assert (
        own["states"]["optimizer"] == 2 * own["states"]["weights"]
    )  # float32: no master weights, and none is shared out
    assert other["states"]["optimizer"] == 6 * other["states"]["weights"] / 4


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("parallel", {"expert": 2}, "parallel.expert = 2 is not supported"),
        (
            "parallel",
            {"tensor": 2, "sequence_parallel": True, "expert_tensor": 1},
            "parallel.expert_tensor = 1 is not supported",
        ),
        ("run", {"dtype": "float64"}, "run.dtype = 'float64' is not supported; give --dtype"),
    ],
)
def test_a_config_that_asks_for_what_is_not_counted(
    key: str, value: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    tree = {
        "extends": str(GRPO.with_name("sft_arithmetic.yaml")), "model": {"experts": {"number": 4, "ffn_hidden": 64}},
        "evaluation": None, "data": {"held_out": None}, key: value,
    }  # fmt: skip
    config.write_text(json.dumps(tree), encoding="utf-8")
    assert main(["plan", str(config), "--tokens", "4096"]) == 2
    assert message in capsys.readouterr().err


def test_megatrons_arguments_have_their_own_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their sizes stand for the flags', and the keys that nothing is read from are named."""
    file = tmp_path / "arguments.json"
    others = {f"other_{i}": i for i in range(20)}
    file.write_text(json.dumps(MEGATRON | {"tensor_model_parallel_size": 8} | others), encoding="utf-8")
    assert main(["plan", str(file), "--tokens", "8192", "--data", "4"]) == 0
    taken, unread, layout = capsys.readouterr().out.splitlines()[:3]
    assert taken == f"taken from {file}: tensor"
    assert unread.startswith(f"not read of {file}: other_0, other_1") and unread.endswith("other_11 and 8 more")
    assert layout == "layout: tensor 8, context 1, pipeline 1, data 4, bfloat16, distributed optimizer"


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
