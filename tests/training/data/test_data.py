"""Data: what is read, and every fault by file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from parallel_rl.experience.rewards import checker, exact_match
from parallel_rl.training.config.load import load_config
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.checking import settle_alphabet
from parallel_rl.training.data.datasets import Datasets, find_data
from parallel_rl.training.data.examples import (
    Rollout,
    parse_example,
    parse_pair,
    parse_prompt,
    parse_rollout,
    write_rollouts,
)
from parallel_rl.training.data.format import Format
from parallel_rl.training.data.reading import read_datasets
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.preflight.check import check_vocabulary
from parallel_rl.training.tokenizer.protocol import CharTokenizer
from tests.training.data.small_blocks import open_records
from tests.training.helpers import CONFIGS, DATA, run

TOKENIZER = CharTokenizer("0123456789+=")
PARSERS: dict[str, Callable[[Mapping[str, object]], object]] = {
    "prompts": partial(parse_prompt, form=Format(TOKENIZER)),
    "examples": partial(parse_example, form=Format(TOKENIZER)),
    "pairs": partial(parse_pair, form=Format(TOKENIZER)),
    "rollouts": partial(parse_rollout, vocab_size=TOKENIZER.vocabulary.size),
}


def read(kind: str, path: Path) -> Records:
    return open_records(str(path), f"data.{kind}", PARSERS[kind])


def test_the_data_that_ships() -> None:
    train, held_out = (list(read("prompts", DATA / f"arithmetic_{name}.jsonl")) for name in ("train", "held_out"))
    for prompt in (*train, *held_out):
        a, b = prompt.text.rstrip("=").split("+")
        assert int(prompt.answer) == int(a) + int(b)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}
    rollouts = read("rollouts", DATA / "arithmetic_rollouts.jsonl")
    assert len(rollouts) == 20 * 32 and len({rollout.group for rollout in rollouts}) == 20 * 8
    careless = read("examples", DATA / "arithmetic_careless.jsonl")
    answers = {prompt.tokens: (*TOKENIZER.encode(prompt.answer), 2) for prompt in train}
    right = sum(example.target.tokens == answers[example.prompt] for example in careless) / len(careless)
    assert 0.1 < right < 0.2


def test_the_generator_gives_what_ships(tmp_path: Path) -> None:
    import runpy

    script = runpy.run_path(str(CONFIGS.parent / "examples" / "make_arithmetic_data.py"))
    script["main"](tmp_path)
    written = sorted(tmp_path.iterdir())
    assert len(written) == 6 and all(path.read_bytes() == (DATA / path.name).read_bytes() for path in written)


GOOD = {"prompt": "1+2=", "answer": "3"}
ROLLOUT = {"group": 0, "tokens": [1, 4, 5, 2], "logprobs": [-0.5, -1.0], "reward": 1.0}
PAIR = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}


@pytest.mark.parametrize(
    ("reader", "good", "bad", "message"),
    [
        ("prompts", GOOD, '{"prompt": "1+', r"line 2: no JSON \("),
        ("prompts", GOOD, "[1]", "line 2: a JSON object is needed"),
        ("prompts", GOOD, {"prompt": "1"}, "line 2: the field 'answer' is missing"),
        ("prompts", GOOD, {**GOOD, "answer": ""}, "line 2: 'answer' = '' is not valid; a text"),
        ("prompts", GOOD, {**GOOD, "answr": "3"}, "line 2: unknown field 'answr'; did you mean 'answer'"),
        ("prompts", GOOD, {**GOOD, "prompt": "1*2="}, r"line 2: the character '\*' of '1\*2=' is not in"),
        ("examples", GOOD, {**GOOD, "answer": "x"}, "line 2: the character 'x'"),
        ("pairs", PAIR, {**PAIR, "rejected": "3"}, "line 2: 'chosen' and 'rejected' are both '3'"),
        ("pairs", PAIR, GOOD, "line 2: unknown field 'answer'"),
        ("rollouts", ROLLOUT, {**ROLLOUT, "logprobs": [-1.0] * 4}, "line 2: 'logprobs' has 4 values for 4 'tokens'"),
        ("rollouts", ROLLOUT, {**ROLLOUT, "logprobs": []}, "line 2: 'logprobs' has 0 values"),
        ("rollouts", ROLLOUT, {**ROLLOUT, "logprobs": [-1.0, 0.1]}, "line 2: 'logprobs' holds 0.1"),
        ("rollouts", ROLLOUT, {**ROLLOUT, "logprobs": [-1.0, "a"]}, r"line 2: logprobs\[1\] = 'a' is not valid"),
        (
            "rollouts",
            ROLLOUT,
            '{"group": 0, "tokens": [1, 2], "logprobs": [NaN], "reward": 1}',
            r"line 2: logprobs\[0\] = nan",
        ),
        (
            "rollouts",
            ROLLOUT,
            {**ROLLOUT, "tokens": [1, 4, 15, 2]},
            "line 2: 'tokens' holds 15, which lies outside the vocabulary",
        ),
        (
            "rollouts",
            ROLLOUT,
            {**ROLLOUT, "tokens": [1, 4, 2.5, 2]},
            r"line 2: tokens\[2\] = 2.5 is not valid; an integer",
        ),
        ("rollouts", ROLLOUT, {**ROLLOUT, "segments": [0]}, "line 2: 'segments' has 1 values for 2 'logprobs'"),
        (
            "rollouts",
            ROLLOUT,
            {**ROLLOUT, "segments": [1, 0]},
            r"line 2: 'segments' = \[1, 0\] must be turns that do not",
        ),
        ("rollouts", ROLLOUT, {**ROLLOUT, "segments": [-1, -1]}, r"line 2: 'segments' = \[-1, -1\] must be turns"),
        ("rollouts", ROLLOUT, {**ROLLOUT, "run": 1.5}, "line 2: run = 1.5 is not valid; an integer"),
        ("rollouts", ROLLOUT, {**ROLLOUT, "group": "a"}, "line 2: group = 'a' is not valid"),
        ("rollouts", ROLLOUT, {**ROLLOUT, "advantage": 1.0}, "line 2: exactly one of 'reward' and 'advantage'"),
    ],
)
def test_a_malformed_line_is_named(reader: str, good: dict, bad: dict | str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(good) + "\n" + (bad if isinstance(bad, str) else json.dumps(bad)) + "\n")
    with pytest.raises(ValueError, match=f"data.jsonl, {message}"):
        list(read(reader, file))


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the data file .*nowhere.jsonl does not exist"):
        read("prompts", tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty.jsonl is empty"):
        read("prompts", tmp_path / "empty.jsonl")


def test_rollouts_survive_the_way_through_a_file(tmp_path: Path) -> None:
    for value in ((1.0, None), (None, -0.5)):
        rollouts = [Rollout((1, 4, 5, 2), (-0.123456789012, -1.0), group, *value) for group in (3, 3, 4)]
        rollouts.append(Rollout((1, 4, 5, 2), (-0.5, -1.0), 4, *value, 2, 7, (0, 3), sample_mask=0))
        write_rollouts(tmp_path / "new" / "rollouts.jsonl", rollouts)
        assert list(read("rollouts", tmp_path / "new" / "rollouts.jsonl")) == rollouts


def load(**overrides: object) -> Datasets:
    """With all of it checked, as in a run that says nothing of it."""
    path, *arguments = run("grpo_arithmetic.yaml", **{"data__check_gigabytes": 1, **overrides})
    config = load_config(path, arguments)
    return read_datasets(config, TOKENIZER, find_data(config.data))


def load_rollouts(records: Sequence[Rollout], folder: Path, steps: int, count: int) -> Datasets:
    write_rollouts(folder / "rollouts.jsonl", records)
    sizes = {"rl__steps": steps, "rl__prompts": count, "rl__group_size": 1, "rl__updates": 1}
    return load(data={"rollouts": str(folder / "rollouts.jsonl")}, warmup="null", evaluation="null", **sizes)


def test_an_alphabet_is_settled_by_the_data(tmp_path: Path) -> None:
    """All that is missing is told at once, and `auto` takes what there is, in an order that no rank and no file changes."""

    def settled(alphabet: str, **overrides: object) -> TrainConfig:
        path, *arguments = run("grpo_arithmetic.yaml", tokenizer={"alphabet": alphabet}, **overrides)
        config = load_config(path, arguments)
        return settle_alphabet(config, find_data(config.data))

    assert settled("auto").tokenizer.alphabet == "+0123456789=" and settled("=+9876543210").tokenizer.alphabet[0] == "="  # type: ignore[index]
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "4*y", "answer": "x"}\n')
    train = {"data__train": str(tmp_path / "train.jsonl")}
    with pytest.raises(
        ValueError, match=r"lacks '\*', 'x', 'y' of the data \('\*' is in .*train.jsonl, line 2\); add them"
    ):
        settled("0123456789+=", **train)
    assert settled("auto", **train).tokenizer.alphabet == "*+0123456789=xy"


def test_a_vocabulary_that_does_not_fit_is_named() -> None:
    path, *arguments = run("grpo_arithmetic.yaml", sampling__top_k=16)
    with pytest.raises(ValueError, match="sampling: top_k = 16 exceeds vocab_size = 15"):
        check_vocabulary(load_config(path, arguments), TOKENIZER.vocabulary)


def test_data_that_contradicts_the_run(tmp_path: Path) -> None:
    assert load().longest == 1 + len("12+34=") + 4
    with pytest.raises(ValueError, match=r"train.jsonl, line 1: the prompt '.*' is in data.train and in data.held_out"):
        load(data__held_out=DATA / "arithmetic_train.jsonl")
    rollouts = {"rollouts": str(DATA / "arithmetic_rollouts.jsonl")}
    with pytest.raises(ValueError, match=r"data.rollouts has 640 sequences; rl.prompts × group_size = 3200 a step"):
        load(data=rollouts, warmup="null", evaluation="null", rl__prompts=400)
    mixed = [Rollout((1, 2), (-1.0,), 0, 0.5, None), Rollout((1, 2), (-1.0,), 1, None, 0.5)]
    with pytest.raises(ValueError, match=r"rollouts.jsonl, line 2: 'reward' is given in every record"):
        load_rollouts(mixed, tmp_path, 1, 2)


def test_checkers() -> None:
    assert (
        checker("exact_match") is exact_match
        and exact_match("", "12", "12") == 1.0
        and exact_match("", "1", "12") == 0.0
    )
    for name, message in (
        ("exact_mach", "reward = 'exact_mach' is not valid"),
        ("os:system", "a config imports nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            checker(name)


def _rollouts(*groups: int) -> list[Rollout]:
    return [Rollout((1, 2), (-1.0,), group, 0.0, None) for group in groups]


def test_recorded_groups_are_whole_in_their_steps(tmp_path: Path) -> None:
    load_rollouts(_rollouts(0, 0, 1, 1, 2, 2, 3, 3), tmp_path, 2, 4)
    load_rollouts(_rollouts(0, 0, 1, 1, 2), tmp_path, 2, 2)  # the rest is not reached
    with pytest.raises(ValueError, match=r"group 1 lies in two steps .*\(at sequence 4, .*, line 4\)"):
        load_rollouts(_rollouts(0, 0, 1, 1, 2, 2), tmp_path, 2, 3)
    for records, steps, count in ((_rollouts(0), 1, 2), (_rollouts(0, 0, 1), 2, 2)):
        with pytest.raises(ValueError, match="a smaller multiple of 2"):
            load_rollouts(records, tmp_path, steps, count)
