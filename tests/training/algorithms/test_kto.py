"""KTO on single labelled answers: the same rows on every layout, the weights that the labels suggest, and that it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.data.datasets import find_data
from parallel_rl.training.data.reading import read_datasets
from tests.training.helpers import CONFIGS, DATA, LAYOUTS, assert_near, run, train_rows

GOOD, STEP = 1 / 10, 20  # of the answers; answers of a step


def write(folder: Path, count: int = 200) -> str:
    """TRL's form, nine of ten answers bad; labels in each of their spellings."""
    pairs = [json.loads(line) for line in (DATA / "arithmetic_pairs.jsonl").read_text().splitlines()[:count]]
    rows = []
    for number, pair in enumerate(pairs):
        good = number % 10 == 3
        label = [good, int(good), 1 if good else -1][number % 3]
        rows.append({"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": label})
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def kto(folder: Path, path: str, **more: object) -> list[str]:
    given = {
        "run__dir": folder,
        "data__answers": path,
        "data__held_out": "null",
        "data__examples": "null",
        "preference__steps": 2,
        "preference__answers": STEP,
        "warmup": "null",
        "evaluation": "null",
        "run__loggers": "[]",
        "model__layers": 1,
        "model__hidden": 16,
        "run__dtype": "float64",
        **more,
    }
    return run(str(CONFIGS / "recipes" / "kto.yaml"), **given)


@pytest.mark.slow
def test_answers_give_the_same_rows_on_every_layout(tmp_path: Path) -> None:
    """... whose first loss is known: the policy is its reference, so that each labelled row has λ/2.

    Pipeline ranks have it in batching/test_packed_layouts.py.
    """
    path = write(tmp_path)
    [one] = run_world(1, train_rows, kto(tmp_path / "one", path))
    good, bad = (one[0][f"num_{side}"] for side in ("desirable", "undesirable"))
    assert good + bad == one[0]["num_mismatched"] == STEP and isinstance(good, float) and isinstance(bad, float)
    assert one[0]["loss"] == pytest.approx((3.5 * good + bad) / 2 / STEP, rel=1e-12)
    world, parallel, packing = LAYOUTS["TP 2 × CP 2 × SP packed"]
    more = {"parallel": parallel, "batch__packing": packing}
    assert_near(run_world(world, train_rows, kto(tmp_path / "four", path, **more))[0], one)
    assert_near(run_world(2, train_rows, kto(tmp_path / "DP 2", path))[0], one, where="DP 2")
    # without mismatched rows where the baseline reads none
    plain = kto(tmp_path / "plain", path, preference__loss="{name: kto, options: {baseline: none}}")
    [rows] = run_world(1, train_rows, plain)
    assert rows[0]["num_mismatched"] == 0 and rows[0]["loss"] == pytest.approx(0.5)


@pytest.mark.parametrize("source", ["answers", "pairs"])
def test_mismatched_rows_fit(source: str, tmp_path: Path) -> None:
    """A long prompt meets a long answer, which each record alone does not: the answer is cut, and the model has room."""
    path = tmp_path / "rows.jsonl"
    long, short = "1+" * 20, "2"
    if source == "answers":
        rows = [{"prompt": long, "answer": short, "label": 1}, {"prompt": short, "answer": long, "label": 0}]
    else:
        rows = [{"prompt": long, "chosen": short, "rejected": "3"}, {"prompt": short, "chosen": long, "rejected": "3"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = "pairs" if source == "answers" else "answers"
    more = {
        f"data__{source}": path,
        f"data__{other}": "null",
        f"preference__{source}": 2,
        f"preference__{other}": "null",
    }
    [rows] = run_world(1, train_rows, kto(tmp_path / "run", "null", **{**more, "model__max_positions": 44}))
    assert rows[0]["num_mismatched"] == 2


def test_the_labels_suggest_weights(tmp_path: Path) -> None:
    path = write(tmp_path)
    given = kto(tmp_path, path, preference__loss="{name: kto}")
    config = load_config(given[0], given[1:])
    data = read_datasets(config, config.tokenizer.build(), find_data(config.data))
    assert data.describe()[1:] == [
        "data.answers: TRL's unpaired preference form: prompt, completion, label",
        "data.answers: 20 desirable, 180 undesirable; the ratio of their weighted numbers is 0.11, outside [1, 4/3]: "
        "undesirable_weight 0.084 to 0.111 is inside",
    ]
    with pytest.raises(ValueError, match=r"line 2: 'label' = 'good' is not valid; true or 1 is desirable"):
        Path(path).write_text('{"prompt": "1+1=", "completion": "2", "label": true}\n' * 2)
        Path(path).write_text(Path(path).read_text().replace("true}\n", '"good"}\n').replace('"good"', "true", 1))
        read_datasets(config, config.tokenizer.build(), find_data(config.data))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"preference__loss": "{name: dpo}"}, r"loss.name = 'dpo' reads \(chosen, rejected\) pairs"),
        ({"preference__loss": "{name: nll}"}, "loss.name = 'nll' reads no labels"),
        ({"preference__pairs": 4}, "pairs = 4 and answers = 20: set one of them"),
        ({"preference__answers": 1}, "answers = 1 must be at least 2"),
        ({"data__pairs": "a"}, "data.pairs = .* would not be read; only preference.pairs needs it"),
    ],
)
def test_what_does_not_go_together(more: dict[str, object], message: str, tmp_path: Path) -> None:
    given = kto(tmp_path, write(tmp_path), **more)
    with pytest.raises(ValueError, match=message):
        load_config(given[0], given[1:])


@pytest.mark.slow
def test_it_learns_where_nine_of_ten_answers_are_bad(tmp_path: Path) -> None:
    options = "{name: kto, options: {desirable_weight: 10.0}}"
    more = {
        "preference__steps": 30,
        "preference__answers": 100,
        "preference__loss": options,
        "preference__optimizer": "{lr: 3e-3}",
        "model__hidden": 32,
        "batch__micro_batch_size": 256,
    }
    [rows] = run_world(1, train_rows, kto(tmp_path / "run", write(tmp_path, 1000), **more))

    def gap(row: dict[str, float | int | str]) -> float:
        return float(row["rewards_desirable_mean"]) - float(row["rewards_undesirable_mean"])

    # the model knows no sums: it learns which digits are seldom good
    assert gap(rows[0]) == 0 and gap(rows[-1]) > 0.3 and float(rows[-1]["loss"]) < 0.9 * float(rows[0]["loss"])
