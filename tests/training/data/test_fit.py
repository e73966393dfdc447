"""Records that do not fit: counted and refused, left out of the order, or cut; the same on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.data.checking import shorten
from parallel_rl.training.data.datasets import Datasets, find_data
from parallel_rl.training.data.examples import Example, Pair, Prompt, Rollout
from parallel_rl.training.data.reading import read_datasets
from parallel_rl.training.preflight.check import length_check
from parallel_rl.training.preflight.facts import planned
from parallel_rl.training.tokenizer.protocol import Target
from tests.training.data.small_blocks import small_blocks
from tests.training.helpers import run

LIMIT = 14


def pair(number: int) -> dict[str, str]:
    """Each seventh is too long, each eleventh has equal answers, each thirteenth an empty one."""
    asked = f"{number}+{number}="
    if number % 7 == 6:
        return {"prompt": asked, "chosen": "1" * 20, "rejected": "2"}
    if number % 11 == 10:
        return {"prompt": asked, "chosen": "1", "rejected": "1"}
    return {"prompt": asked, "chosen": str(number * 2), "rejected": "" if number % 13 == 12 else "9"}


def unfit(number: int) -> tuple[bool, bool]:
    """Whether a pair is too long, and whether its answers are equal or empty."""
    return number % 7 == 6, number % 7 != 6 and (number % 11 == 10 or number % 13 == 12)


def read(path: str, **options: object) -> Datasets:
    data = {"pairs": path, "max_length": LIMIT, **options}
    given = run("dpo_arithmetic.yaml", data=data, evaluation="null", warmup="null")
    config = load_config(given[0], [*given[1:]])
    return read_datasets(config, config.tokenizer.build(), find_data(config.data), length_check(config))


def write(folder: Path, count: int = 300) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair(number)) + "\n" for number in range(count)))
    return str(path)


@small_blocks
def stream(rank: int, path: str, options: dict[str, object]) -> tuple[list[object], str, list[str], str]:
    assert dist.is_initialized()
    data = read(path, **options)
    return list(data.pairs.stream(range(500), 3)), data.pairs.fingerprint, data.describe(), data.pairs.name_of(100)


def test_records_that_are_dropped_leave_the_order(tmp_path: Path) -> None:
    path = write(tmp_path)
    drop = {"too_long": "drop", "invalid": "drop", "check_gigabytes": 0}
    [one] = run_world(1, stream, path, drop)
    assert all(other == one for other in run_world(4, stream, path, drop))
    kept = [number for number in range(300) if not any(unfit(number))]
    records = read(path, **drop).pairs
    assert [records[place].prompt for place in range(len(records))] == [
        records[0].prompt[:1] + tuple(3 + "0123456789+=".index(char) for char in f"{number}+{number}=")
        for number in kept
    ]
    assert one[3].endswith(f"line {kept[100] + 1}")
    texts = one[0][: len(kept)]
    assert len({*texts}) == len(kept)  # a pass has each record that is left once
    assert [line for line in one[2] if "dropped" in line] == [
        f"data.pairs: warning: {300 - len(kept):,} of 300 records ({1 - len(kept) / 300:.1%}) dropped; the longest sequence "
        f"had {max(len(f'{n}+{n}=') for n in range(6, 300, 7)) + 1 + 21} tokens"
    ]
    tree = {"extends": run("dpo_arithmetic.yaml")[0], "evaluation": None, "warmup": None}
    tree["data"] = {"train": None, "held_out": None, "examples": None, "pairs": path, "max_length": LIMIT, **drop}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert {line for line in one[2] if "dropped" in line} <= {*planned(str(tmp_path / "run.yaml")).data}
    whole = read(path, too_long="truncate", invalid="drop").pairs
    assert whole.fingerprint != records.fingerprint and len(whole) > len(records)


def test_a_pair_needs_room_for_its_tree_where_prefixes_are_shared() -> None:
    pair = Pair((1,) * 12, Target((2,) * 6, None), Target((3,) * 5, None))
    refused = {}
    for tokens, shares in ((23, True), (22, True), (23, False)):
        batch = f"{{packing: true, share_prefixes: {shares}, tokens: {tokens}, micro_batch_size: null}}"
        path, *given = run("dpo_arithmetic.yaml", batch=batch, evaluation="null", warmup="null", data__examples="null")
        check = length_check(load_config(path, given))
        try:
            check(18, pair)
        except ValueError as error:
            refused[tokens, shares] = str(error)
    assert refused == {
        (
            22,
            True,
        ): "batch.tokens = 22 is too few: a row holds 22, and the 2 rows of a record take up to 23 with padding",
        (
            23,
            False,
        ): "batch.tokens = 23 is too few: a row holds 23, and the 2 rows of a record take up to 36 with padding",
    }


def test_records_that_are_cut_keep_a_learned_token(tmp_path: Path) -> None:
    records = read(write(tmp_path), too_long="truncate", invalid="drop").pairs
    lengths = [len(one.prompt) + len(side.tokens) for one in list(records) for side in (one.chosen, one.rejected)]
    assert max(lengths) == LIMIT and all(one.chosen.tokens and one.prompt for one in list(records))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"line 7: data.max_length = 14 is too few; the sequence takes \d+ \(42 of 300 records; data.too_long: drop "),
        ({"too_long": "drop"}, r"line 11: 'chosen' and 'rejected' are both '1' \(\d+ of 300 records; data.invalid: drop "),
        ({"max_length": 3, "too_long": "drop", "invalid": "drop"}, r"each of the 300 records is dropped \(invalid, too_long\)"),
    ],
)  # fmt: skip
def test_all_that_do_not_fit_are_counted(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path), **options)


def test_what_is_cut() -> None:
    """A prompt of RL on its left, an answer at its end, and a prompt on its left where the answer would have no token."""
    prompt = tuple(range(10))
    assert shorten(Prompt(prompt, "", ""), 8, 3).tokens == prompt[-5:]
    example = shorten(Example(prompt, Target((1, 2, 3))), 12, 0)
    assert (example.prompt, example.target.tokens) == (prompt, (1, 2))
    example = shorten(Example(prompt, Target((1, 2, 3, 4), (0, 0, 1, 1))), 11, 0)
    assert (example.prompt, example.target) == (prompt[-8:], Target((1, 2, 3), (0, 0, 1)))
    with pytest.raises(ValueError, match="3 tokens leave no room for a prompt before the first learned token, place 3"):
        shorten(Example(prompt, Target((1, 2, 3, 4), (0, 0, 1, 1))), 3, 0)
    with pytest.raises(ValueError, match=r"3 tokens leave no room for a prompt before sampling.max_new_tokens = 3"):
        shorten(Prompt(prompt, "", ""), 3, 3)
    rollout = Rollout((1, 2), (0.0,), 0, 1.0, None)
    assert shorten(rollout, 1, 0) is rollout
