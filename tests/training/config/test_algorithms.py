"""The objectives learn, alike on every layout; what a run records can be trained on; the display survives a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from parallel_rl.training.reporting.run_log import RunLog, draw_curves, read_metrics
from tests.training.helpers import LAYOUTS, assert_near, run, train_rows

TINY = {
    "model__hidden": 16,
    "model__layers": 1,
    "run__dtype": "float64",
    "run__loggers": "[]",
    "batch__micro_batch_size": 8,
    "evaluation": "null",
}
WARMUP = "{steps: 1, batch_size: 8, optimizer: {lr: 3e-3}}"
KL_IN_REWARD = {
    "warmup": WARMUP,
    "reward": "long_answers",
    "rl__steps": 2,
    "rl__prompts": 4,
    "rl__group_size": 4,
    "rl__updates": 2,
    "rl__optimizer": "{lr: 3e-3}",
    "rl__advantages": "{name: reinforce_plus_plus, kl_coefficient: 0.5}",
    "rl__reward_kl": "k2",
}


def rows_of(config: str, folder: Path, layout: str, **overrides: object) -> list[dict]:
    world, parallel, packing = LAYOUTS[layout]
    arguments = run(config, run__dir=folder, parallel=parallel, batch__packing=packing, **{**TINY, **overrides})
    results = run_world(world, train_rows, arguments)
    assert all(rows == results[0] for rows in results)
    return results[0]


OBJECTIVES = {
    "dpo_arithmetic.yaml": {
        "warmup": WARMUP,
        "preference__steps": 4,
        "preference__pairs": 8,
        "preference__optimizer": "{lr: 3e-3}",
    },
    "sft_arithmetic.yaml": {"sft__steps": 4, "sft__batch_size": 16, "sft__optimizer": "{lr: 3e-3}"},
}


@pytest.mark.slow
@pytest.mark.parametrize("config", list(OBJECTIVES))
def test_the_other_objectives_agree_and_learn(config: str, tmp_path: Path) -> None:
    one = rows_of(config, tmp_path / "one", "one process", **OBJECTIVES[config])
    steps = {name: 2 if name.endswith("__steps") else value for name, value in OBJECTIVES[config].items()}
    four = rows_of(config, tmp_path / "four", "TP 2 × CP 2 × SP packed", **steps)
    assert len(four) >= 2
    assert_near(four, one[: len(four)])
    main = [row for row in one if "accuracy" in row or config.startswith("sft")]
    assert len(main) == 4 and main[-1]["loss"] < main[0]["loss"] - 0.02


@pytest.mark.slow
def test_truncated_sampling_agrees_on_every_layout(tmp_path: Path) -> None:
    """Draws, old log-probs and the loss follow one rule; what is compared with the reference policy follows none."""
    more = {
        **KL_IN_REWARD,
        "sampling": "{max_new_tokens: 2, temperature: 0.9, top_k: 9, top_p: 0.9}",
        "rl__kl_controller": "{target: 0.1}",
        "rl__prompts": 2,
        "rl__loss": "{name: clipped_pg, options: {reference_policy_kl_penalty: 0.1}}",
    }
    one = rows_of("grpo_arithmetic.yaml", tmp_path / "one", "one process", **more)
    four = rows_of("grpo_arithmetic.yaml", tmp_path / "four", "TP 2 × CP 2 × SP packed", **more)
    assert_near(one, four)
    first, second = one[-2:]
    # before the first update the policy is the sampler and the reference: the same log-probs, whole or truncated
    assert first["gen_kl_error"] == pytest.approx(0, abs=1e-12) and first["reward_kl"] == pytest.approx(0, abs=1e-12)
    assert second["reward_kl"] > 0 and all(row["dropped_tokens"] < row["tokens"] / 4 for row in one[-2:])
    whole = rows_of(
        "grpo_arithmetic.yaml", tmp_path / "whole", "one process", **{**more, "sampling": "{temperature: 0.9}"}
    )
    assert whole[-2]["entropy"] > first["entropy"] + 0.1  # that of the truncated policy


@pytest.mark.slow
def test_kl_in_the_reward_and_nll_of_good_samples(tmp_path: Path) -> None:
    """What reaches over the whole step: returns with the KL, whitened over it, and the count of the good samples' tokens."""
    more = {
        **KL_IN_REWARD,
        "rl__loss__options": "{use_kl_in_reward: true, positive_example_nll_weight: 0.1}",
    }
    one = rows_of("grpo_arithmetic.yaml", tmp_path / "one", "one process", **more)
    four = rows_of("grpo_arithmetic.yaml", tmp_path / "four", "TP 2 × CP 2 × SP packed", **more)
    assert_near(one, four)
    assert one[-1]["positive_nll_loss"] > 0 == one[-1]["kl_penalty"]
    costly = {**more, "rl__advantages": "{name: reinforce_plus_plus, kl_coefficient: 5.0}"}
    other = rows_of("grpo_arithmetic.yaml", tmp_path / "costly", "one process", **costly)
    assert other[-1]["loss"] != one[-1]["loss"]  # the KL of the second step, which is not 0, is in its advantages


@pytest.mark.slow
def test_what_was_recorded_can_be_trained_on(tmp_path: Path) -> None:
    """The first update on the recording is the one on the fresh samples: the same numbers."""
    small = {
        "warmup": "null",
        "data__examples": "null",
        "rl__prompts": 4,
        "rl__group_size": 4,
        "rl__optimizer": "{lr: 3e-3}",
    }
    more = {"reward": "long_answers", "rl__updates": 1}
    first = rows_of("grpo_arithmetic.yaml", tmp_path / "a", "TP 2", **small, **more, rl__steps=2, rl__record="true")
    files = sorted((tmp_path / "a" / "rollouts").iterdir())
    assert [path.name for path in files] == ["step_000001_0.jsonl", "step_000002_0.jsonl"]
    recording = tmp_path / "rollouts.jsonl"
    recording.write_text("".join(path.read_text() for path in files))
    assert len({json.loads(line)["group"] for line in recording.read_text().splitlines()}) == 8
    data = {"data": {"rollouts": str(recording)}}
    small.pop("data__examples")
    again = rows_of("grpo_arithmetic.yaml", tmp_path / "b", "one process", **{**small, **more, **data}, rl__steps=2)
    assert_near(again, first, abs=1e-9)


def test_rows_survive_a_kill_and_a_resume(tmp_path: Path) -> None:
    with RunLog(tmp_path, "rl", active=True, after=None) as log:
        for step in (1, 2, 3):
            log.step("rl", step, {"loss": 0.5 * step, "tokens_per_second": 1.0})
            assert len(read_metrics(tmp_path / "metrics.jsonl")) == step  # on the disk before the next step
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "r')
    with RunLog(tmp_path, "rl", active=True, after={"warmup": 5, "rl": 2}):
        assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    with RunLog(tmp_path, "rl", active=False, after=None) as log:  # another rank
        log.step("rl", 9, {"loss": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_no_picture_of_nothing(tmp_path: Path) -> None:
    assert not draw_curves([{"phase": "warmup", "step": 1, "loss": 1.0}], tmp_path / "a.png", "a")
    assert list(tmp_path.iterdir()) == []
    assert draw_curves([{"phase": "sft", "step": 1, "loss": 1.0}], tmp_path / "a.png", "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
