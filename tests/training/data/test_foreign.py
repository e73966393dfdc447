"""Data as it is found: conversations, foreign columns, plain texts, tool text in rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallel_rl.config.strict import configure
from parallel_rl.experience import register_reward
from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.data import DataConfig
from parallel_rl.training.config.load import load_config
from parallel_rl.training.data.examples import Rollout, parse_example, parse_pair, parse_prompt, write_rollouts
from parallel_rl.training.data.format import Format
from parallel_rl.training.data.parsers import parsers
from parallel_rl.training.tokenizer.protocol import CharTokenizer
from tests.training.helpers import LAYOUTS, run, train_rows
from tests.training.tokenizer.folders import write_tokenizer

QUESTIONS = [f"A farmer has {a} apples and gives {b} of them away. How many?" for a in (7, 8, 9, 12) for b in (2, 3)]
HELD_OUT = ["How many apples are left?", "What is the sum of 12 and 30?"]
CHARS = CharTokenizer("0123456789+=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    return write_tokenizer(tmp_path_factory.mktemp("qwen3"))


@register_reward("level")
def level(prompt: str, completion: str, answer: str, extra: Mapping[str, Any]) -> float:
    """A checker that reads a column that is no field, and the text of the question."""
    assert prompt in QUESTIONS + HELD_OUT and "#### " in answer and extra["source"] == "gsm8k"
    return float(extra["meta"]["level"])


def foreign(number: int) -> dict[str, object]:
    source = "gsm8k" if number % 2 else "other"
    return {
        "question": (QUESTIONS + HELD_OUT)[number],
        "meta": {"level": number, "truth": f"so many\n#### {number}"},
        "data_source": source,
        "id": number,
    }


COLUMNS = {"prompt": "question", "answer": "meta.truth", "source": "data_source"}


def test_a_record_is_read_as_what_it_says(folder: Path) -> None:
    """Every form of a question is the same ids as the conversation that it means; nothing of a row is lost to the checker."""
    tokenizer = load_config(*_config(folder)).tokenizer.build()
    form = Format(tokenizer, COLUMNS)
    asked: list[dict[str, object]] = [{"role": "user", "content": QUESTIONS[3]}]
    system = {"role": "system", "content": "Be brief."}
    prompt = parse_prompt(foreign(3), form)
    assert list(prompt.tokens) == tokenizer.render(asked)
    assert (prompt.text, prompt.answer, prompt.source) == (QUESTIONS[3], "so many\n#### 3", "gsm8k")
    assert prompt.extra == {"meta": foreign(3)["meta"], "id": 3, "source": "gsm8k"}
    # verl's form: a conversation in the column `prompt`
    verl = {"prompt": asked, "reward_model": {"ground_truth": "3"}, "text": "of no concern"}
    columns = {"messages": "prompt", "answer": "reward_model.ground_truth"}
    assert parse_prompt(verl, Format(tokenizer, columns)).tokens == prompt.tokens
    plain = {"prompt": QUESTIONS[3], "answer": "3"}
    with_system = tuple(tokenizer.render([system, *asked]))
    for row, given in (
        (plain, "Be brief."),
        ({**plain, "system": "Be brief."}, "Be long."),
        ({"messages": [system, *asked], "answer": "3"}, "Be long."),
    ):
        assert parse_prompt(row, Format(tokenizer, system=given)).tokens == with_system
    # demonstrations
    whole = [*asked, {"role": "assistant", "content": "3"}]
    for row in ({"messages": whole}, plain, {"messages": asked, "answer": "3"}):
        example = parse_example(row, Format(tokenizer))
        assert list(example.prompt) == tokenizer.render(asked)
        assert example.target == tokenizer.target(asked, whole[1:]) and example.target.mask is None
    text = parse_example({"text": "There are 7."}, Format(tokenizer))
    assert [*text.prompt, *text.target.tokens] == tokenizer.document("There are 7.") and len(text.prompt) == 1
    pair = parse_pair({**plain, "chosen": "3", "rejected": "4", "answer": "3"}, Format(tokenizer, {"prompt": "prompt"}))
    assert pair.chosen == tokenizer.target(asked, whole[1:]) and pair.prompt == prompt.tokens


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"questoin": "1", "answer": "2"}, {"prompt": "question"}, "'question' .* prompt. is missing; did .* 'questoin'"),
        ({"prompt": "1", "meta": {"key": "2"}}, {"answer": "meta.kay"}, "'meta.kay' .* is missing; did you mean 'key'"),
        ({"prompt": "1", "meta": "2"}, {"answer": "meta.key"}, "'meta.key' .* is missing; it lies in '2'"),
        ({"prompt": "1", "answr": "2", "id": 1}, {"prompt": "prompt"}, "'answer' is missing; data.columns.answer: answr"),
        ({"prompt": "1", "answr": "2"}, {}, "unknown field 'answr'; did you mean 'answer'"),
        ({"prompt": "1", "messages": [], "answer": "2"}, {}, "exactly one of 'prompt' and 'messages'"),
        ({"answer": "2"}, {}, "the field 'prompt' is missing"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, {}, r"prompt\[0\].content = None is not valid; a text"),
        ({"prompt": 1, "answer": "2"}, {}, "'prompt' = 1 is not valid; a text"),
        ({"messages": "1", "answer": "2"}, {}, "'messages' = '1' is not valid; a list"),
        ({"messages": [{"content": "1"}], "answer": "2"}, {}, r"messages\[0\] = .* is not valid; \{role, content\}"),
        ({"messages": [{"role": "user", "content": [1]}], "answer": "2"}, {}, r"messages\[0\].content has the part 1; only"),
        ({"messages": [{"role": "assistant", "content": "1"}], "answer": "2"}, {}, "'messages' ends with an answer"),
        ({"messages": [{"role": "system", "content": "1"}], "system": "3", "answer": "2"}, {}, "are both given"),
        ({"prompt": "1", "system": "+", "answer": "2"}, {}, r"cannot write a conversation; .* \['system', 'user'\]"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_says_why(row: dict[str, object], columns: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_prompt(row, Format(CHARS, columns))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "1", "answer": "2"}, "'text' is all of a record; it also has 'answer'"),
        ({"messages": [{"role": "user", "content": "1"}]}, "ends with one of 'user'; a text of 'assistant'"),
        ({"text": ""}, "'text' = '' is not valid"),
    ],
)
def test_a_demonstration_that_is_none(row: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_example(row, Format(CHARS))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "question"}, "columns: 'promt' is not a field; did you mean 'prompt'"),
        ({"trian.prompt": "question"}, "before the dot did you mean 'train'"),
        ({"chosen": "a"}, "columns: 'chosen' has no effect; only data.pairs have that field"),
        ({"prompt": "a..b"}, "columns.prompt = 'a..b' is not valid"),
        ({"prompt": 3}, "data.columns.prompt = 3 is not valid"),
    ],
)
def test_a_mapping_of_columns_that_is_wrong(columns: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(DataConfig, {"train": "a", "columns": columns}, "data")


def test_every_source_has_a_reward(folder: Path) -> None:
    """A source without one is found when the data is checked, not in the middle of a step."""
    config = load_config(*_config(folder, reward={"gsm8k": "exact_match", "othr": "exact_match"}))
    parse = parsers(config, config.tokenizer.build())
    assert parse.train(foreign(1)).source == "gsm8k"
    with pytest.raises(ValueError, match="'source' = 'other' has no reward; did you mean 'othr'"):
        parse.train(foreign(2))
    with pytest.raises(ValueError, match=r"reward = \{\} is empty"):
        load_config(*_config(folder, reward={}))


def _config(folder: Path, **overrides: object) -> tuple[str, list[str]]:
    small: dict[str, object] = {
        "tokenizer": {"hf": str(folder)},
        "data": {"train": "train.jsonl", "columns": COLUMNS},
        "warmup": "null",
        "evaluation": "null",
        "model": {"layers": 1, "hidden": 16, "heads": 2, "max_positions": 128, "vocab_multiple": 4},
        "sampling__max_new_tokens": 3,
        "rl": {"steps": 1, "prompts": 8, "group_size": 2, "optimizer": {"lr": 1e-3}},
        "reward": "level",
    }
    path, *arguments = run("grpo_arithmetic.yaml", **{**small, "parallel": {}, **overrides})
    return path, arguments


def _train(rank: int, runs: list[tuple[str, list[str]]]) -> list[list[dict[str, Any]]]:
    return [train_rows(rank, [path, *arguments]) for path, arguments in runs]


@pytest.mark.slow
def test_foreign_columns_train(folder: Path, tmp_path: Path) -> None:
    """GSM8K-like JSONL and Parquet with a folder's tokenizer: the same step, whose reward is the checkers' by source."""
    import pyarrow
    import pyarrow.parquet

    for name, numbers in (("train", range(8)), ("held_out", (8, 9))):
        rows = [foreign(number) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    texts = [{"text": text, "url": "x"} for text in QUESTIONS]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    by_source = {"gsm8k": "level", "other": "exact_match"}
    one = partial(_config, folder, reward=by_source)
    runs = [
        one(
            run__dir=tmp_path / kind,
            data={name: str(tmp_path / f"{name}.{kind}") for name in ("train", "held_out")} | {"columns": COLUMNS},
            evaluation={"samples": 2},
        )
        for kind in ("jsonl", "parquet")
    ]
    sft = {"steps": 1, "batch_size": 8, "optimizer": {"lr": 1e-3}}
    plain = {"examples": str(tmp_path / "text.jsonl"), "columns": {"examples.text": "text"}}
    runs.append(one(run__dir=tmp_path / "sft", rl="null", sft=sft, data=plain, reward="exact_match"))
    [[[first], [second], [text]]] = run_world(1, _train, runs)
    assert first == second and first["reward"] == sum(number for number in (1, 3, 5, 7)) / 8
    assert (first["held_out_mean@2"], first["held_out_mean@2/gsm8k"], first["held_out_mean@2/other"]) == (4.5, 9, 0)
    tokenizer = load_config(*runs[0]).tokenizer.build()
    scored = sum(len(tokenizer.document(row)) - 1 for row in QUESTIONS)  # the first token has nothing before it
    assert text["tokens"] == scored and text["loss"] > 0


ROLLOUTS = [
    Rollout((1, 4, 13, 5, 14, 6, 7, 8, 9, 2), (-1.0, -2.0, -0.5, -1.5, -0.25), number // 2, float(number % 2), None, mask=mask)
    for number, mask in enumerate([(1, 0, 0, 1, 1), (1, 1, 1, 1, 1), (0, 0, 1, 1, 1), (1, 0, 1, 0, 1)])
]  # fmt: skip


def _recorded(folder: Path, name: str, rollouts: list[Rollout], layout: str = "one process") -> list[dict[str, Any]]:
    world, parallel, packing = LAYOUTS[layout]
    write_rollouts(folder / f"{name}.jsonl", rollouts)
    arguments = run(
        "grpo_arithmetic.yaml",
        run={"dir": str(folder / f"{name} {layout}"), "dtype": "float64", "loggers": []},
        data={"rollouts": str(folder / f"{name}.jsonl")},
        warmup="null",
        evaluation="null",
        parallel=parallel,
        batch__packing=packing,
        model={"layers": 1, "hidden": 32, "heads": 4, "init_std": 0.3, "vocab_multiple": 4},
        rl__steps=2,
        rl__prompts=2,
        rl__group_size=2,
        rl__updates=1,
        rl__prev_logprobs="generation",
    )
    return run_world(world, train_rows, arguments)[0]


@pytest.mark.slow
def test_tool_text_in_a_rollout_carries_no_gradient(tmp_path: Path) -> None:
    """Two steps are the same bits whatever is recorded of masked tokens, and with them in the prompt; so on every layout."""
    rows = _recorded(tmp_path, "masked", ROLLOUTS)
    others = [
        replace(one, logprobs=tuple(x if kept else -9.0 for x, kept in zip(one.logprobs, one.mask or (), strict=True)))
        for one in ROLLOUTS
    ]
    assert _recorded(tmp_path, "other log-probs", others) == rows
    as_prompt = [*ROLLOUTS[:2], replace(ROLLOUTS[2], logprobs=ROLLOUTS[2].logprobs[2:], mask=None), ROLLOUTS[3]]
    assert _recorded(tmp_path, "as prompt", as_prompt) == rows
    assert _recorded(tmp_path, "unmasked", [replace(one, mask=None) for one in ROLLOUTS])[0]["loss"] != rows[0]["loss"]
    for row, one in zip(_recorded(tmp_path, "masked", ROLLOUTS, "TP 2 × CP 2 × SP packed"), rows, strict=True):
        assert {name: row[name] for name in ("loss", "grad_norm", "tokens")} == pytest.approx(
            {name: one[name] for name in ("loss", "grad_norm", "tokens")}, rel=1e-9
        )
