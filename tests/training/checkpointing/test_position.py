"""The place in the data: a run that goes on with other sizes takes the very next record, and refuses another order of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

from parallel_rl.testing.pool import WorldError, run_world
from tests.training.checkpointing.saves import snapshot
from tests.training.helpers import DATA, cut, run, train_rows

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RECORDS = 24  # fewer than a run takes: it goes on within its second pass
SMALL = {
    "run__loggers": "[]",
    "model__layers": 1,
    "model__hidden": 16,
    "evaluation": "null",
    "data__held_out": "null",
    "run__checkpoint_every": 2,
    "run__keep_checkpoints": 20,
}
ALONE = {"warmup": "null", "data__examples": "null"}
EXAMPLES = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(RECORDS)]
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(RECORDS)]
ROLLOUTS = [
    {"tokens": [1, 4 + n % 10, 4 + n // 10, 2], "logprobs": [-0.5, -1.0], "group": n // 2, "reward": float(n % 2)}
    for n in range(RECORDS)
]
RL = {**ALONE, "rl__steps": 6, "reward": "long_answers"}
# the config, its source, what it holds, sizes of 8 records a step, and others of 4
RUNS: dict[str, tuple[str, str, list[dict], dict[str, object], dict[str, object]]] = {
    "SFT records": ("sft", "examples", EXAMPLES, {"sft__steps": 6, "sft__batch_size": 8}, {"sft__batch_size": 4}),
    "preference pairs": (
        "dpo",
        "pairs",
        PAIRS,
        {**ALONE, "preference__steps": 6, "preference__pairs": 8},
        {"preference__pairs": 4},
    ),
    "prompts": (
        "grpo",
        "train",
        EXAMPLES,
        {**RL, "rl__prompts": 8, "rl__group_size": 2, "rl__updates": 2},
        {"rl__prompts": 4, "rl__updates": 1},
    ),
    "recorded rollouts": (
        "grpo",
        "rollouts",
        ROLLOUTS,
        {**RL, "data__train": "null", "rl__prompts": 4, "rl__group_size": 2, "rl__updates": 2},
        {"rl__prompts": 2, "rl__updates": 1},
    ),
}


def write(folder: Path, kind: str, records: Sequence[dict]) -> list[str]:
    """Two files."""
    folder.mkdir()
    for number, part in enumerate((records[:7], records[7:])):
        if kind == "jsonl":
            (folder / f"{number}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
        else:
            parquet.write_table(pyarrow.Table.from_pylist(list(part)), folder / f"{number}.parquet", row_group_size=3)
    return [str(folder / f"*.{kind}")]


def arguments(name: str, folder: Path, files: list[str], **more: object) -> list[str]:
    config, source, _, sizes, _ = RUNS[name]
    settings = {"run__dir": folder, "parallel": "{}", f"data__{source}": files, **SMALL, **sizes, **more}
    return run(f"{config}_arithmetic.yaml", **settings)


def _train_and_tell(rank: int, given: list[str]) -> list[str]:
    """The records that the steps of a run take, in their order."""
    from parallel_rl.training.algorithms import rl_step
    from parallel_rl.training.data.records.source import Records

    taken: list[str] = []

    def telling(read: Callable) -> Callable:
        def tells(*arguments: object) -> list:
            found = read(*arguments)
            taken.extend(map(str, found))
            return found

        return tells

    stream, rollouts = telling(Records.stream), telling(rl_step._read)
    with mock.patch.object(Records, "stream", stream), mock.patch.object(rl_step, "_read", rollouts):
        train_rows(rank, given)
    return taken


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if kind == "parquet" else pytest.mark.slow)
        for name, kind in zip(RUNS, ["jsonl", "parquet"] * 2, strict=True)
    ],
)
def test_a_restart_with_other_sizes_takes_the_next_record(name: str, kind: str, tmp_path: Path) -> None:
    """Takes some twenty seconds: a run, its first part and the rest of it with other sizes, through all records."""
    *_, records, _, smaller = RUNS[name]
    files = write(tmp_path / "data", kind, records)
    [whole] = run_world(1, _train_and_tell, arguments(name, tmp_path / "whole", files))
    if name == "preference pairs":  # each step reads the one after each pair, too
        whole = [pair for first in range(0, len(whole), 16) for pair in whole[first : first + 8]]
    assert len(whole) >= 40 and sorted(whole[:RECORDS]) == sorted(set(whole))  # each pass has each record once
    cut(tmp_path / "whole", tmp_path / "stopped", 4)  # 32 records are taken
    given = arguments(name, tmp_path / "stopped", files, **smaller)
    [later] = run_world(1, _train_and_tell, given)
    if name == "preference pairs":
        later = [pair for first in range(0, len(later), 8) for pair in later[first : first + 4]]
    assert later == whole[32:40]  # two steps of 4


@pytest.mark.slow
def test_what_dynamic_sampling_set_aside_is_passed_over(tmp_path: Path) -> None:
    """Its steps have the same records whether earlier ones needed all of their rounds or not."""
    files, name = write(tmp_path / "data", "jsonl", EXAMPLES), "prompts"
    more = {"rl__dynamic_sampling": "{max_rounds: 3, exhausted: mask}", "rl__prompts": 2, "rl__steps": 6}
    [whole] = run_world(1, _train_and_tell, arguments(name, tmp_path / "whole", files, **more))
    cut(tmp_path / "whole", tmp_path / "stopped", 4)
    position = json.loads((tmp_path / "stopped/checkpoints/step_000004/manifest.json").read_text())["body"]
    assert json.loads(position)["record"]["position"] == {"phase": "rl", "step": 4, "taken": {"train": 24}}
    [later] = run_world(1, _train_and_tell, arguments(name, tmp_path / "stopped", files, **more))
    assert later and later == whole[-len(later) :]


@pytest.mark.slow
def test_another_order_of_the_records_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    files = write(tmp_path / "data", "jsonl", EXAMPLES)
    folder = tmp_path / "run"
    run_world(1, train_rows, arguments("prompts", tmp_path / "whole", files))
    cut(tmp_path / "whole", folder, 4)
    before = snapshot(folder)
    rollouts = write(tmp_path / "rollouts", "jsonl", ROLLOUTS)
    changes = {
        r"run\.seed = 1 was 0 when .*step_000004 was written": {"run__seed": 1},
        r"data\.train had another content or order, .* when .*step_000004": {
            "data__train": str(DATA / "arithmetic_train.jsonl")
        },
        r"data\.buffer_megabytes": {"data__buffer_megabytes": 1},
        r"data\.train is left out and was given when": {
            "data__train": "null",
            "data__rollouts": rollouts,
            "rl__prompts": 4,
        },
        r"its rl step 4 is step 4 of all phases there and 6 in this run": {
            "warmup": "{steps: 2, batch_size: 2, optimizer: {lr: 3e-3}}",
            "data__examples": files,
        },
    }
    for words, change in changes.items():
        with pytest.raises(WorldError, match=words) as refused:
            run_world(2, train_rows, arguments("prompts", folder, files, **change))
        assert sorted(refused.value.errors) == [0, 1] and snapshot(folder) == before
