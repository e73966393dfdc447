"""Solutions with labelled steps: TRL's ids and labels, records that are refused, and a process reward model that learns."""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path

import pytest

from parallel_rl.losses.core.requirements import Field
from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.config.model import TokenizerConfig
from parallel_rl.training.data.checking import shorten
from parallel_rl.training.data.datasets import find_data
from parallel_rl.training.data.format import Format
from parallel_rl.training.data.parsers import Solution, parse_solution
from parallel_rl.training.data.reading import read_datasets
from parallel_rl.training.tokenizer.protocol import CharTokenizer, Tokenizer
from tests.training.helpers import CONFIGS, LAYOUTS, assert_near, run, train_rows
from tests.training.tokenizer.folders import write_tokenizer

PRM = str(CONFIGS / "recipes" / "prm.yaml")
RECORD = {
    "prompt": "How many apples are left?",
    "completions": ["12 apples, 5 of them away.", "There are 7 left."],
    "labels": [True, False],
}


def trl_row(tokenizer: Tokenizer, begin: list[int], separator: str) -> tuple[list[int], list[int]]:
    """The ids and labels of TRL's `PRMTrainer.tokenize_row`, which writes the begin token before the prompt."""
    steps = [[*tokenizer.encode(step), *tokenizer.encode(separator)] for step in RECORD["completions"]]
    labels = [[-100] * (len(ids) - 1) + [int(label)] for ids, label in zip(steps, RECORD["labels"], strict=True)]
    prompt = [*begin, *tokenizer.encode(str(RECORD["prompt"]))]
    return [*prompt, *chain(*steps)], [-100] * len(prompt) + [*chain(*labels)]


def labels_of(record: Solution) -> list[int]:
    values, mask = iter(record.labels), record.target.mask or ()
    return [-100] * len(record.prompt) + [int(next(values)) if at_end else -100 for at_end in mask]


@pytest.mark.parametrize("separator", ["\n", "\n\nki"])
@pytest.mark.parametrize("form", ["qwen3", "llama3"])
def test_the_ids_and_labels_are_trls(form: str, separator: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = TokenizerConfig(hf=str(write_tokenizer(tmp_path, form)), chat=False).build()
    begin = tokenizer.document("a")[:1] if form == "llama3" else []
    found = parse_solution(RECORD, Format(tokenizer), tokenizer.encode(separator))
    ids, labels = trl_row(tokenizer, begin, separator)
    assert [*found.prompt, *found.target.tokens] == ids and labels_of(found) == labels
    cut = shorten(found, len(ids) - 1, 0)  # the last step ends behind the limit
    assert [*cut.prompt, *cut.target.tokens] == ids[:-1] and labels_of(cut) == labels[:-1]


def test_the_last_step_alone_may_be_learned() -> None:
    """As by TRL's train_on_last_step_only; a field of one's own has a value for each step."""
    tokenizer = CharTokenizer("0123456789+=")
    form = Format(tokenizer, user_fields=(Field("bonus"),))
    row = {"prompt": "1+1=", "completions": ["2", "34"], "labels": [0, 1], "bonus": [0.5, 2]}
    whole, last = (parse_solution(row, form, tokenizer.encode("="), last_only=only) for only in (False, True))
    assert whole.target.mask == (0, 1, 0, 0, 1) and last.target.mask == (0, 0, 0, 0, 1) and last.labels == (1,)
    assert whole.user_values == last.user_values == ((0, 0.5, 0, 0, 2),)
    with pytest.raises(ValueError, match="'bonus' has 3 values for 2 steps"):
        parse_solution({**row, "bonus": [1, 2, 3]}, form, tokenizer.encode("="))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [1]}, r"'labels' = \[1\] is not valid; a list of 2 is needed, one for each step"),
        ({"labels": [1, None]}, r"labels\[1\] = None is not valid; true or 1 for a good step"),
        ({"labels": [0.5, 1]}, r"labels\[0\] = 0.5 is not valid; true or 1 for a good step"),
        ({"completions": ["2", ""]}, r"'completions' = .* is not valid; a list of texts, one for each step"),
        ({"completions": []}, r"'completions' = \[\] is not valid"),
        ({"step": 1}, r"the columns of TRL's stepwise supervision form, and the unknown column 'step'"),
    ],
)
def test_a_malformed_solution_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "completions": ["2", "2"], "labels": [1, 0], **change}) + "\n")
    config = load_config(PRM, [f"--data.solutions={path}"])
    with pytest.raises(ValueError, match=message):
        read_datasets(config, config.tokenizer.build(), find_data(config.data))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("data.step_separator=+", r"placeholder_token_id = 14 is not the last token of data.step_separator = '\+'"),
        ("data.step_separator=", "step_separator = .* is not valid"),
        ("sft.loss.options.reward_token_ids=null", "reward_token_ids = None is not valid: the steps of data.solutions"),
        ("data.examples=a.jsonl", "data.examples = .* would not be read"),
        ("data.solutions=null", "step_separator = '=' has no effect"),
        ("data={examples: a.jsonl, last_step_only: true}", "last_step_only = True has no effect"),
    ],
)
def test_what_does_not_go_together(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config = load_config(PRM, [f"--{option}"])
        read_datasets(config, config.tokenizer.build(), find_data(config.data))


@pytest.mark.slow
def test_a_process_reward_model_learns(tmp_path: Path) -> None:
    """It learns that an even step is good, from the same rows on every layout."""
    dice, path = random.Random(0), tmp_path / "solutions.jsonl"
    records = [[dice.randrange(10, 100) for _ in range(3)] for _ in range(200)]
    rows = [
        {"prompt": "1+1=", "completions": [*map(str, steps)], "labels": [step % 2 == 0 for step in steps]}
        for steps in records
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {
        "run__dtype": "float64",
        "data__solutions": path,
        "run__loggers": "[]",
        "model__hidden": 16,
        "batch__micro_batch_size": 8,
        "sft__batch_size": 16,
        "sft__optimizer": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"},
    }
    [one] = run_world(1, train_rows, run(PRM, run__dir=tmp_path / "one", sft__steps=25, **more, batch__packing=False))
    assert one[0]["num_steps"] == 48 and float(one[0]["loss"]) > 0.6  # chance: log 2
    assert float(one[-1]["loss"]) < 0.5
    world, parallel, packing = LAYOUTS["TP 2 × CP 2 × SP packed"]
    more |= {"parallel": parallel, "batch__packing": packing}
    assert_near(run_world(world, train_rows, run(PRM, run__dir=tmp_path / "many", sft__steps=2, **more))[0], one[:2])
