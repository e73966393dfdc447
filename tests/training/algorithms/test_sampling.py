"""`parallel-rl sample`: what a checkpoint's policy answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from tests.training.helpers import run, run_command, train_rows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a policy that a few steps have taught to say something, with more words than its tokenizer."""
    folder = tmp_path_factory.mktemp("sampled") / "run"
    given = run(
        "sft_arithmetic.yaml",
        run__dir=folder,
        parallel="{}",
        model__layers=2,
        model__hidden=16,
        model__vocab_size=20,
        sft="{steps: 6, batch_size: 16, optimizer: {lr: 3e-2}}",
        evaluation="null",
        data__held_out="null",
        run__loggers="[]",
    )
    run_world(1, train_rows, given)
    return folder / "checkpoints" / "step_000006"


@pytest.mark.slow
def test_every_layout_prints_the_same_answers_once(checkpoint: Path) -> None:
    """Prompts in their order, each with its answers; drawn by number and seed, whichever data or tensor rank has them."""
    words = f"sample {checkpoint} --prompt 1+2= --prompt 30+4= --samples 3 --temperature 1.5".split()
    [(status, screen, errors)] = run_world(1, run_command, words)
    assert status == 0 and errors == ""
    lines = screen.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == ["1+2=", "30+4="] and len(lines) == 8
    assert len(set(lines)) > 3, "the answers differ"
    for world, layout in ((2, []), (2, ["--parallel.tensor", "2"]), (4, ["--parallel.pipeline", "2"])):
        outcomes = run_world(world, run_command, [*words, *layout])
        assert outcomes == [(0, screen, ""), *[(0, "", "")] * (world - 1)]
    [(_, again, _)] = run_world(1, run_command, [*words, "--seed", "1"])
    assert again != screen
    greedy = f"sample {checkpoint} --prompt 1+2= --samples 2 --temperature 0 --max-new-tokens 2".split()
    [(_, sure, _)] = run_world(1, run_command, greedy)
    first, second = sure.splitlines()[1:]
    assert first == second and len(first) <= 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no prompt: write --prompt TEXT"),
        (["--prompt", "x"], "the character 'x'"),
        (["--prompt", "1", "--samples", "0"], "--samples 0 is not valid"),
        (
            ["--prompt", "1", "--temperature", "-1"],
            "--temperature -1 is not valid; 0 (greedy) or a finite number above 0 is",
        ),
        (["--prompt", "1+2=", "--max-new-tokens", "80"], "more than model.max_positions = 64; lower --max-new-tokens"),
        (["--prompt", "1", "--model.hidden", "32"], "the checkpoint = "),
        (["--prompt", "1", "--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_sampled_is_said(words: list[str], message: str, checkpoint: Path) -> None:
    [(status, screen, errors)] = run_world(1, run_command, ["sample", str(checkpoint), *words])
    assert status == 2 and screen == "" and message in errors
