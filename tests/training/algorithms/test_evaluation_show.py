"""`evaluation.show`: what one looks at while a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.algorithms.evaluation import ShownSample, shown_text
from tests.training.helpers import DATA, run, screen_of_run


def test_samples_of_an_evaluation_are_printed_once_whichever_rank_drew_them(tmp_path: Path) -> None:
    """The first prompts in order with text, completion, answer and the reward of the checker; on the first rank alone."""
    lines = (DATA / "arithmetic_held_out.jsonl").read_text().splitlines()[:4]
    prompts = [json.loads(line) for line in lines]
    (tmp_path / "held_out.jsonl").write_text("\n".join(lines))
    given = run(
        "sft_arithmetic.yaml",
        run__dir=tmp_path / "run",
        data__held_out=tmp_path / "held_out.jsonl",
        model__layers=1,
        model__hidden=16,
        parallel="{}",
        sft="{steps: 1, batch_size: 8, optimizer: {lr: 3e-3}}",
        evaluation="{samples: 2, show: 3}",
        reward="long_answers",
        run__loggers="[tensorboard]",
    )
    screen, silent = run_world(2, screen_of_run, given)
    assert silent == ""
    blocks = screen.split("held-out prompt ")[1:]
    assert [int(block[0]) for block in blocks] == [1, 2, 3] * 2  # before and after
    for block, prompt in zip(blocks, [*prompts[:3]] * 2, strict=True):
        first, *texts = block.splitlines()[:4]
        named = dict(line.strip().partition(" ")[::2] for line in texts)
        assert named["prompt"].strip() == prompt["prompt"] and named["answer"].strip() == prompt["answer"]
        assert float(first.split()[-1]) == pytest.approx(len(named.get("completion", "").strip()) / 4)


@pytest.mark.parametrize("zeros", [1, 2])
def test_a_completion_that_cannot_be_scored_counts_as_0(zeros: int, tmp_path: Path) -> None:
    """... if such ones are at most a tenth; else the run ends."""
    rows = [{"prompt": f"{10 + n}+{n}=", "answer": "00" if n < zeros else "11"} for n in range(10)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = run(
        "sft_arithmetic.yaml",
        run__dir=tmp_path / "run",
        data__held_out=tmp_path / "held_out.jsonl",
        model__layers=1,
        model__hidden=16,
        parallel="{}",
        sft="{steps: 1, batch_size: 8, optimizer: {lr: 3e-3}}",
        evaluation="{samples: 1}",
        reward="no_zeros",
    )
    if zeros > 1:
        with pytest.raises(WorldError, match=r"KeyError: '10\+0=' \(2 by reward of 10 samples failed, more than"):
            run_world(1, screen_of_run, given)
        return
    [screen] = run_world(1, screen_of_run, given)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["held_out_samples_failed/reward"] == 1 and last["held_out_reward"] == pytest.approx(0.9)
    assert screen.count("warning: a sample failed and is masked: reward 'no_zeros' of sample 0 failed") == 1
    assert "0.9" in screen and "KeyError: '10+0='" in screen


def test_a_text_that_would_steer_the_terminal_is_shown_as_characters() -> None:
    text = shown_text([ShownSample(2, "a\nb", "\x1b[2Jc" + "d" * 5000, "", 1.0)])
    assert text.splitlines()[1:4] == [
        "  prompt      a",
        " " * 14 + "b",
        "  completion  \\x1b[2Jc" + "d" * 3995 + " … (1,005 more characters)",
    ]
