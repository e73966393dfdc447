"""Data: what is read, and every fault by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_rl.experience.rewards import checker, exact_match
from parallel_rl.training.data import Rollout, read_examples, read_pairs, read_prompts, read_rollouts, write_rollouts
from parallel_rl.training.datasets import check_groups, read_datasets, take
from parallel_rl.training.load import load_config
from parallel_rl.training.tokenizer import BOS, EOS, PAD, CharTokenizer
from tests.training.helpers import CONFIGS, DATA, run

TOKENIZER = CharTokenizer("0123456789+=")


def test_tokenizer() -> None:
    assert TOKENIZER.prompt("1+2=") == [BOS, 4, 13, 5, 14] and TOKENIZER.completion("3") == [6, EOS]
    assert TOKENIZER.vocab_size == 15
    assert TOKENIZER.decode([BOS, *TOKENIZER.encode("12=3"), EOS, 4, PAD]) == "12=3"
    with pytest.raises(ValueError, match=r"the character '-' of '1-2' is not in tokenizer.alphabet"):
        TOKENIZER.encode("1-2")
    with pytest.raises(ValueError, match="has the character '1' twice"):
        CharTokenizer("121")
    with pytest.raises(ValueError, match="is empty"):
        CharTokenizer("")


def test_the_data_that_ships() -> None:
    train, held_out = (
        read_prompts(str(DATA / f"arithmetic_{name}.jsonl"), TOKENIZER) for name in ("train", "held_out")
    )
    for prompt in (*train, *held_out):
        a, b = prompt.text.rstrip("=").split("+")
        assert int(prompt.answer) == int(a) + int(b)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}
    rollouts = read_rollouts(str(DATA / "arithmetic_rollouts.jsonl"), TOKENIZER.vocab_size)
    assert len(rollouts) == 20 * 32 and len({rollout.group for rollout in rollouts}) == 20 * 8
    careless = read_examples(str(DATA / "arithmetic_careless.jsonl"), TOKENIZER)
    answers = {prompt.tokens: tuple(TOKENIZER.completion(prompt.answer)) for prompt in train}
    right = sum(example.completion == answers[example.prompt] for example in careless) / len(careless)
    assert 0.1 < right < 0.2


def test_the_generator_gives_what_ships(tmp_path: Path) -> None:
    import runpy

    script = runpy.run_path(str(CONFIGS.parent / "examples" / "make_arithmetic_data.py"))
    script["main"](tmp_path)
    written = sorted(tmp_path.iterdir())
    assert len(written) == 4 and all(path.read_bytes() == (DATA / path.name).read_bytes() for path in written)


GOOD = {"prompt": "1+2=", "answer": "3"}
ROLLOUT = {"group": 0, "tokens": [1, 4, 5, 2], "logprobs": [-0.5, -1.0], "reward": 1.0}
PAIR = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}


@pytest.mark.parametrize(
    ("reader", "good", "bad", "message"),
    [
        ("prompts", GOOD, "", "line 2: the line is empty"),
        ("prompts", GOOD, '{"prompt": "1+', r"line 2: no JSON \("),
        ("prompts", GOOD, "[1]", "line 2: a JSON object is needed"),
        ("prompts", GOOD, {"prompt": "1"}, "line 2: the field 'answer' is missing"),
        ("prompts", GOOD, {**GOOD, "answer": 3}, "line 2: 'answer' = 3 is not valid; a text"),
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
        ("rollouts", ROLLOUT, {**ROLLOUT, "group": "a"}, "line 2: group = 'a' is not valid"),
        ("rollouts", ROLLOUT, {**ROLLOUT, "advantage": 1.0}, "line 2: exactly one of 'reward' and 'advantage'"),
        (
            "rollouts",
            ROLLOUT,
            {"group": 0, "tokens": [1, 4], "logprobs": [-1], "advantage": 1},
            "line 2: a file gives 'reward' in",
        ),
    ],
)
def test_a_malformed_line_is_named(reader: str, good: dict, bad: dict | str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(good) + "\n" + (bad if isinstance(bad, str) else json.dumps(bad)) + "\n")
    with pytest.raises(ValueError, match=f"data.jsonl, {message}"):
        if reader == "rollouts":
            read_rollouts(str(file), TOKENIZER.vocab_size)
        else:
            {"prompts": read_prompts, "examples": read_examples, "pairs": read_pairs}[reader](str(file), TOKENIZER)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the data file .*nowhere.jsonl does not exist"):
        read_prompts(str(tmp_path / "nowhere.jsonl"), TOKENIZER)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty.jsonl is empty"):
        read_prompts(str(tmp_path / "empty.jsonl"), TOKENIZER)


def test_rollouts_survive_the_way_through_a_file(tmp_path: Path) -> None:
    for value in ((1.0, None), (None, -0.5)):
        rollouts = [Rollout((1, 4, 5, 2), (-0.123456789012, -1.0), group, *value) for group in (3, 3, 4)]
        write_rollouts(tmp_path / "new" / "rollouts.jsonl", rollouts)
        assert read_rollouts(str(tmp_path / "new" / "rollouts.jsonl"), 15) == rollouts


def test_data_that_contradicts_the_run(tmp_path: Path) -> None:
    def read(**overrides: object) -> None:
        path, *arguments = run("grpo_arithmetic.yaml", **overrides)
        read_datasets(load_config(path, arguments), TOKENIZER)

    with pytest.raises(ValueError, match=r"is in data.train and in data.held_out"):
        read(data__held_out=DATA / "arithmetic_train.jsonl")
    with pytest.raises(ValueError, match=r"take 3 tokens; sampling.max_new_tokens = 2 must be at least that"):
        read(sampling__max_new_tokens=2)
    rollouts = {"rollouts": str(DATA / "arithmetic_rollouts.jsonl")}
    with pytest.raises(ValueError, match=r"data.rollouts has 640 sequences; rl.prompts × group_size = 3200 a step"):
        read(data=rollouts, warmup="null", evaluation="null", rl__prompts=400)


def test_checkers() -> None:
    assert (
        checker("exact_match") is exact_match
        and exact_match("", "12", "12") == 1.0
        and exact_match("", "1", "12") == 0.0
    )
    assert checker("parallel_rl.experience.rewards:exact_match") is exact_match
    for name, message in (
        ("exact_mach", "reward = 'exact_mach' is not valid"),
        ("nowhere:f", "cannot be loaded: No module named 'nowhere'"),
        ("math:nothing", "cannot be loaded"),
        ("math:pi", "is a float; a function"),
    ):
        with pytest.raises(ValueError, match=message):
            checker(name)


def test_every_pass_takes_each_item_once_and_any_window_of_the_stream_agrees() -> None:
    stream = take(10, 0, 35, seed=3)
    assert sorted(stream[:10]) == sorted(stream[10:20]) == list(range(10)) and stream[:10] != stream[10:20]
    assert [item for start in range(0, 35, 7) for item in take(10, start, 7, seed=3)] == stream
    assert take(10, 0, 35, seed=4) != stream


def _rollouts(*groups: int) -> list[Rollout]:
    return [Rollout((1, 2), (-1.0,), group, 0.0, None) for group in groups]


def test_recorded_groups_are_whole_in_their_steps() -> None:
    check_groups(_rollouts(0, 0, 1, 1, 2, 2, 3, 3), 4, 2)
    check_groups(_rollouts(0, 0, 1, 1, 2), 2, 2)  # the rest is not reached
    with pytest.raises(ValueError, match=r"group 1 lies in two steps .*\(at sequence 4\)"):
        check_groups(_rollouts(0, 0, 1, 1, 2, 2), 3, 2)
    for records, steps in ((_rollouts(0), 1), (_rollouts(0, 0, 1), 2)):
        with pytest.raises(ValueError, match="a smaller multiple of 2"):
            check_groups(records, 2, steps)
