"""Records from the library `datasets`, and through a function of the user's own: the same records, order and resumption."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from parallel_rl.config.names import left_to_ranks
from parallel_rl.testing.pool import WorldError, preload, run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.data.datasets import find_data
from parallel_rl.training.data.records.source import Records, index_of
from parallel_rl.training.preflight.check import check_run
from tests.training.data import maps
from tests.training.data.test_streaming import LINES, SMALL
from tests.training.helpers import cut, run, train_rows

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")
preload("tests.training.data.test_sources", "datasets")

ROWS = [json.loads(line) for line in LINES[:300]]
MAPS = "tests.training.data.maps"


def given(folder: Path, **more: object) -> list[str]:
    """Arguments of a short run."""
    return run("sft_arithmetic.yaml", run__dir=folder, **{**SMALL, **more})


def records(folder: Path, **data: object) -> Records:
    """The rows of `data.examples` as they are."""
    arguments = given(folder, **{f"data__{key}": value for key, value in data.items()})
    files = find_data(load_config(arguments[0], arguments[1:]).data)["examples"]
    return Records(files, index_of(files, "data.examples"), dict)


def written(folder: Path) -> dict[str, dict[str, str]]:
    """The same rows in every kind of file and folder."""
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "a.json").write_text(json.dumps(ROWS))
    (folder / "a.csv").write_text("prompt,answer\r\n" + "".join(f"{row['prompt']},{row['answer']}\r\n" for row in ROWS))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    whole = datasets.Dataset.from_list(ROWS)
    whole.to_parquet(str(folder / "a.parquet"))
    whole.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": whole, "test": whole.select(range(3))}).save_to_disk(str(folder / "splits"))
    (folder / "files").mkdir()
    (folder / "files" / "train.jsonl").write_bytes((folder / "a.jsonl").read_bytes())
    names = ("a.jsonl", "a.json", "a.csv", "b.jsonl.gz", "a.parquet", "saved", "splits", "files")
    return {name: {"dataset": str(folder / name)} for name in names}


def test_every_kind_of_source_has_the_same_rows(tmp_path: Path) -> None:
    for name, source in written(tmp_path / "data").items():
        got = records(tmp_path, examples=json.dumps(source))
        rows = [got[place] for place in range(len(got))]
        assert [{key: str(value) for key, value in row.items()} for row in rows] == [
            {key: str(value) for key, value in row.items()} for row in ROWS
        ], name
    few = records(tmp_path, examples=json.dumps({"dataset": str(tmp_path / "data" / "splits"), "split": "test"}))
    assert len(few) == 3


@pytest.mark.slow
def test_runs_go_on_with_the_next_row(tmp_path: Path) -> None:
    """One rank and two take the same rows in the same order; a run that stopped goes on; a changed data set is refused."""
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    source = json.dumps({"dataset": str(folder)})

    def reading(name: str, **more: object) -> list[str]:
        return given(tmp_path / name, **{"data__examples": source, **more})

    [rows] = run_world(1, train_rows, reading("one"))
    two = run_world(2, train_rows, reading("two"))[0]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in rows], rel=1e-9)
    cut(tmp_path / "one", tmp_path / "stopped", 4)
    [later] = run_world(1, train_rows, reading("stopped"))
    assert later == rows[4:]
    cut(tmp_path / "one", tmp_path / "changed", 4)
    other = tmp_path / "other"
    datasets.Dataset.from_list([*ROWS[:-1], ROWS[0]]).save_to_disk(str(other))
    with pytest.raises(WorldError, match=r"data.examples had another content or order"):
        run_world(1, train_rows, reading("changed", data__examples=json.dumps({"dataset": str(other)})))


def numbered(path: Path) -> str:
    rows = [{"n": n, "question": f"{n}+1=", "solution": str(n + 1)} for n in range(1, 41)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_map_changes_and_drops_and_multiplies_records(tmp_path: Path) -> None:
    got = records(tmp_path, examples=numbered(tmp_path / "a.jsonl"), map=f"{MAPS}:questions")
    want = [
        record
        for n in range(1, 41)
        if n % 5
        for record in [{"prompt": f"{n}+1=", "answer": str(n + 1)}] * (2 if n % 7 == 0 else 1)
    ]
    assert [got[place] for place in range(len(got))] == want


def test_a_run_with_another_map_is_refused(tmp_path: Path) -> None:
    files = numbered(tmp_path / "a.jsonl")
    options: dict[str, Any] = {"data__examples": files, "sft__batch_size": 4, "data__map": f"{MAPS}:questions"}
    [rows] = run_world(1, train_mapped, given(tmp_path / "one", **options))
    cut(tmp_path / "one", tmp_path / "again", 4)
    assert run_world(1, train_mapped, given(tmp_path / "again", **options)) == [rows[4:]]
    cut(tmp_path / "one", tmp_path / "other", 4)
    with pytest.raises(WorldError, match=r"data.map .* is .*:same_questions .* and was .*:questions "):
        run_world(1, train_mapped, given(tmp_path / "other", **{**options, "data__map": f"{MAPS}:same_questions"}))


def train_mapped(rank: int, arguments: list[str]) -> object:
    assert maps.questions
    return train_rows(rank, arguments)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            f"{MAPS}:a_set",
            r"a.jsonl, mapped record 1: data.map: .*a_set returned .*, a set; a record \(a mapping\), a list",
        ),
        (f"{MAPS}:a_text", r"a_text returned 'prompt', a str"),
        (f"{MAPS}:broken", r"broken raised KeyError: 'missing'"),
        (f"{MAPS}:changing", r"changing gives two different records for one row; it must be deterministic"),
        (f"{MAPS}:nothing", r"has no function 'nothing'"),
        ("no_such_module:f", r"a config imports nothing; pass --import no_such_module"),
        ("questions", r"data.map = 'questions' is not valid; write module:function"),
    ],
)
def test_refused_maps(tmp_path: Path, function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        records(tmp_path, examples=numbered(tmp_path / "a.jsonl"), map=function)[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"dataset": "saved", "split": "test"}, "has no split 'test'; it has train"),
        ({"dataset": "one", "split": "test"}, "is one saved split, so split = 'test' has no effect"),
        ({"dataset": "script"}, "is a loading script, which would run code of its own"),
        ({"dataset": "notes.txt"}, "the kind of notes.txt is unknown"),
        ({"datset": "saved"}, "datset"),
        ("a.csv", r"is not JSONL, one object a line, nor Parquet; read it by \{dataset: "),
        ("a.json", r"read it by \{dataset: "),
        ("a.jsonl.gz", r"unpack it, or read it by \{dataset: "),
    ],
)
def test_refused_sources(tmp_path: Path, source: dict[str, str] | str, message: str) -> None:
    whole = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:5])})
    whole.save_to_disk(str(tmp_path / "saved"))
    whole["train"].save_to_disk(str(tmp_path / "one"))
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("raise SystemExit('ran')")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "a.json").write_text(" [{}]")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    if isinstance(source, dict):
        value: object = json.dumps({key: str(tmp_path / x) if key != "split" else x for key, x in source.items()})
    else:
        value = str(tmp_path / source)
    with pytest.raises(ValueError, match=message):
        records(tmp_path, examples=value)


def test_a_map_may_change_its_row_and_drop_whole_blocks(tmp_path: Path) -> None:
    """Each call sees the row as it was read; a source that loses every record is refused."""
    files = numbered(tmp_path / "a.jsonl")
    got = records(tmp_path, examples=files, map=f"{MAPS}:in_place")
    assert got[0]["n"] == [1, 0]
    with pytest.raises(ValueError, match=r"data.examples: data.map leaves no record"):
        records(tmp_path, examples=files, map=f"{MAPS}:nothing_left")


def test_a_check_leaves_the_map_to_the_ranks(tmp_path: Path) -> None:
    with left_to_ranks(["my_maps"]) as lines:
        arguments = given(tmp_path, data__examples=numbered(tmp_path / "a.jsonl"), data__map="my_maps:question")
        check_run(load_config(arguments[0], arguments[1:]), 1)
    assert lines == [
        "not looked at: data.map 'my_maps.question', which my_maps is to register when the ranks import it"
    ]
