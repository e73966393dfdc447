"""Micro-batches that are filled by tokens and dealt over data ranks train the model that one process trains in order."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from tests.training.helpers import CONFIGS, train_rows

OF_THE_LAYOUT = {"packing_efficiency", "padding_fraction", "data_imbalance"}
TOKENS = {
    "DPO": 72,
    "reward model": 72,
    "KTO": 108,
}  # the longest pair and triple, padded to multiples of 4; others: 40
LAYOUTS = {
    "DP 2": (2, {}),
    "TP 2 × DP 2 × SP": (4, {"tensor": 2, "sequence_parallel": True}),
    "CP 2 × DP 2": (4, {"context": 2}),
    "PP 2 × DP 2": (4, {"pipeline": 2}),
}
MODEL = {"hidden": 16, "heads": 4, "position": "rope", "vocab_multiple": 4, "max_positions": 64}
RL = {
    "rl.steps": 1,
    "rl.prompts": 8,
    "rl.group_size": 2,
    "rl.updates": 2,
    "rl.optimizer": "{lr: 3e-3}",
    "reward": "long_answers",
}
PAIRS = {"preference.steps": 2, "preference.pairs": 8, "preference.optimizer": "{lr: 3e-3}", "warmup": "null"}
RECORDED = {"data": "{rollouts: ROLLOUTS}", "warmup": "null"}
SAMPLED = {"data": "{train: EXAMPLES}", "warmup": "null", "sampling.max_new_tokens": 12}
# recipe and overrides
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "GRPO": ("grpo", {**RL, **RECORDED}),
    "quantile of the step": ("high_entropy", {**RL, **RECORDED}),
    "sampled, covariances": ("clip_cov", {**RL, **SAMPLED, "rl.loss.options.surrogate.fraction": 0.2}),
    "dynamic sampling": ("dapo", {**RL, **SAMPLED, "rl.dynamic_sampling": "{max_rounds: 2, exhausted: mask}"}),
    "experts": ("mix", {**RL, "data": "{rollouts: ROLLOUTS, examples: EXAMPLES}", "warmup": "null", "rl.experts": 8}),
    "critic": ("ppo", {**RL, **RECORDED, "rl.critic.warmup_steps": 1, "rl.steps": 2}),
    "DPO": ("dpo", {**PAIRS, "data": "{pairs: PAIRS}", "preference.steps": 4}),
    "KTO": ("kto", {**PAIRS, "preference.answers": "null", "data": "{pairs: PAIRS}"}),
    "reward model": ("reward_model", {**PAIRS, "data": "{pairs: PAIRS}"}),
    "SFT": ("sft", {"sft.steps": 2, "sft.batch_size": 16, "data": "{examples: EXAMPLES}"}),
}
# tensor ranks of pairs are in config/test_algorithms.py and algorithms/test_kto.py, those of the others in test_recipes.py
RUNS = {
    "GRPO": "TP 2 × DP 2 × SP",
    "quantile of the step": "PP 2 × DP 2",
    "sampled, covariances": "TP 2 × DP 2 × SP",
    "DPO": "PP 2 × DP 2",
    "KTO": "PP 2 × DP 2",
    "SFT": "DP 2",
    "dynamic sampling": "CP 2 × DP 2",
    "experts": "CP 2 × DP 2",
    "critic": "PP 2 × DP 2",
    "reward model": "DP 2",
}


def write_data(folder: Path) -> dict[str, Path]:
    """Sequences of lognormal lengths: 2 to 26 tokens of completion."""
    generator = random.Random(0)

    def digits() -> str:
        count = min(25, max(1, round(generator.lognormvariate(1.8, 0.8))))
        return "".join(generator.choices("0123456789", k=count))

    prompts = [f"{number}+{7 * number}=" for number in range(48)]
    pairs = [{"prompt": prompt, "chosen": "1" + digits(), "rejected": "2" + digits()} for prompt in prompts]
    rollouts = []
    for place in range(64):
        tokens = [3 + int(digit) for digit in digits()]
        logprobs = [round(-3 * generator.random(), 6) for _ in tokens]
        record = {"group": place // 2, "tokens": [1, 4, 13, 5, 14, *tokens], "logprobs": logprobs}
        rollouts.append({**record, "reward": generator.random()})
    lines = {
        "EXAMPLES": [{"prompt": prompt, "answer": digits()[:20]} for prompt in prompts],
        "PAIRS": pairs,
        "ROLLOUTS": rollouts,
    }
    for name, records in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {name: folder / f"{name}.jsonl" for name in lines}


def arguments(case: str, folder: Path, run: str, **more: object) -> list[str]:
    recipe, overrides = CASES[case]
    settings = {
        "model": {**MODEL, "layers": 2 if RUNS[case].startswith("PP") else 1},
        "run.loggers": "[]",
        "run.dtype": "float64",
        "run.dir": folder / run,
        "evaluation": "null",
        **overrides,
        **more,
    }
    files = write_data(folder)
    text = [f"--{key}={value}" for key, value in settings.items()]
    for name, path in files.items():
        text = [item.replace(name, str(path)) for item in text]
    return [str(CONFIGS / "recipes" / f"{recipe}.yaml"), *text]


def train_and_count(rank: int, arguments: list[str]) -> tuple[list[dict[str, float | int | str]], list[int]]:
    """The rows, and how many micro-batches this rank had in each optimizer step."""
    from parallel_rl.training.models import learner

    counts: list[int] = []
    train_step = learner.train_step

    def counted(engine, optimizer, batches, *args, **kwargs):  # type: ignore[no-untyped-def]
        counts.append(len(batches))
        return train_step(engine, optimizer, batches, *args, **kwargs)

    learner.train_step = counted
    try:
        return train_rows(rank, arguments), counts
    finally:
        learner.train_step = train_step


def in_one_process(case: str, folder: Path) -> list[dict[str, float | int | str]]:
    """The rows of padded micro-batches in the order of the data."""
    batch = {"packing": False, "micro_batch_size": 6}
    return run_world(1, train_rows, arguments(case, folder, "one", batch=batch))[0]


@pytest.mark.parametrize(
    ("case", "layout"), [pytest.param(*run, marks=[] if run[0] == "GRPO" else pytest.mark.slow) for run in RUNS.items()]
)
def test_one_process_trains_the_same_model(case: str, layout: str, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[layout]
    batch = {"packing": True, "tokens": TOKENS.get(case, 40)}
    expected = in_one_process(case, tmp_path)
    more = arguments(case, tmp_path, "many", batch=batch, parallel=parallel)
    results = run_world(world, train_and_count, more, timeout=240)
    for rows, _ in results:
        for row, other in zip(rows, expected, strict=True):
            assert row.keys() - other.keys() == {key for key in row if key.removeprefix("critic_") in OF_THE_LAYOUT}
            for key in other.keys() - {"phase"}:
                assert row[key] == pytest.approx(other[key], rel=1e-8, abs=1e-11), f"{key} at step {row['step']}"
            check_figures(row)
    counts = [counts for _, counts in results]
    assert min(map(min, counts)) >= 1 and max(map(max, counts)) >= 2
    # as uneven as it comes: the ranks make different numbers of micro-batches in one step
    assert case != "DPO" or len(set(map(tuple, counts))) > 1
    assert max(float(row["grad_norm"]) for row in expected if "grad_norm" in row) > 0


def check_figures(row: dict[str, float | int | str]) -> None:
    """What each row says of its micro-batches can be."""
    efficiency = next(row[key] for key in row if key.endswith("packing_efficiency"))
    imbalance = next(row[key] for key in row if key.endswith("data_imbalance"))
    padding = next(row[key] for key in row if key.endswith("padding_fraction"))
    assert 0.5 < float(efficiency) <= 1 <= float(imbalance) < 1.2 and 0 <= float(padding) < 0.25
