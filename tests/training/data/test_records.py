"""Records: found in files, indexed in blocks, the same on any number of ranks, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.data.checking import check, spread_blocks
from parallel_rl.training.data.datasets import braces, find_files
from parallel_rl.training.data.records import files, source
from parallel_rl.training.data.records.files import Entries, JsonlFile
from parallel_rl.training.data.records.source import Records, index_of
from tests.training.data.small_blocks import open_records, small_blocks

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def number(row: Mapping[str, object]) -> int:
    value = row["n"]
    if not isinstance(value, int):
        raise ValueError(f"n = {value!r} is not valid")
    return value


def write_jsonl(path: Path, numbers: Sequence[int], width: int = 0) -> Path:
    path.write_text("".join(json.dumps({"n": n, "text": "x" * (n * 7919 % (width + 1))}) + "\n" for n in numbers))
    return path


def write_parquet(path: Path, numbers: Sequence[int], group: int) -> Path:
    table = pyarrow.table({"n": list(numbers), "text": ["x" * 50] * len(numbers)})
    parquet.write_table(table, path, row_group_size=group)
    return path


@pytest.fixture
def in_small_blocks() -> Iterator[None]:
    with small_blocks:
        yield


@pytest.fixture
def mixed(tmp_path: Path, in_small_blocks: None) -> list[str]:
    """1000 records in two JSONL shards and one of Parquet."""
    write_jsonl(tmp_path / "a_0.jsonl", range(300), 200)
    write_jsonl(tmp_path / "a_1.jsonl", range(300, 600))
    write_parquet(tmp_path / "b.parquet", range(600, 1000), 64)
    return [str(tmp_path / "a_{0..1}.jsonl"), str(tmp_path / "*.parquet")]


def test_records_are_found_by_their_place_in_the_files(mixed: list[str]) -> None:
    records = open_records(mixed, "data.train", number, window=4096)
    assert len(records) == 1000 and len(records.index) > 50
    assert list(records) == list(range(1000))
    assert [records[place] for place in (999, 0, 599, 600, 123)] == [999, 0, 599, 600, 123]
    assert records.name_of(299).endswith("a_0.jsonl, line 300") and records.name_of(300).endswith("a_1.jsonl, line 1")
    assert records.name_of(665).endswith("b.parquet, row 66")
    with pytest.raises(IndexError):
        records[1000]


@pytest.mark.parametrize("ending", ["\n", ""])
@pytest.mark.parametrize("step", [1, 2, 7, 64, 10_000])
def test_any_cut_of_the_bytes_gives_the_same_index(ending: str, step: int, tmp_path: Path) -> None:
    lines = ["{}", '{"n": 1}', "", '{"n": "' + "y" * 100 + '"}', "[]", "x", '{"n": 3}']
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(lines) + ending)
    file = JsonlFile(path, path.stat().st_size)
    units = file.units(step)
    whole = file.index(0, 0, units, step)
    cuts = sorted({0, units // 3, units // 2, units})
    parts = [file.index(0, first, last, step) for first, last in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)
    found: list[bytes] = []
    for _, start, size, count, crc in whole.tolist():
        block = file.read(start, size, crc)
        bounds = block._bounds
        assert len(bounds) == count + 1
        found += [block._data[a:b] for a, b in pairwise(bounds)]
    assert b"".join(found) == path.read_bytes() and [line.strip().decode() for line in found] == lines


@pytest.mark.parametrize("blank", ["\n", "\r\n \t\n\n", "\n" * 200_000, " "])
def test_blank_lines_at_the_end_are_skipped(blank: str, tmp_path: Path) -> None:
    """They are no records, and a file keeps its fingerprint; a blank line between two records stays an error."""
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [0, 1])
    before = open_records(str(path), "data.train", number).fingerprint
    with path.open("a", newline="") as file:
        file.write(blank)
    records = open_records(str(path), "data.train", number)
    assert list(records) == [0, 1] and records.fingerprint == before
    write_jsonl(tmp_path / "b.jsonl", [2])
    path.write_text(path.read_text() + "\n" + (tmp_path / "b.jsonl").read_text())
    with pytest.raises(ValueError, match="line 3: the line is empty"):
        list(open_records(str(path), "data.train", number))


def test_a_source_smaller_than_the_window_is_shuffled_as_a_whole(mixed: list[str]) -> None:
    records = open_records(mixed, "data.train", number)
    one = records.stream(range(1000), seed=1)
    assert sorted(one) == list(range(1000))
    moved = np.abs(np.array(one) - np.arange(1000))
    assert 250 < moved.mean() < 420  # a third of 1000 for a random permutation


def test_patterns(tmp_path: Path) -> None:
    for name in ("s_1.jsonl", "s_0.jsonl", "s_10.jsonl", "[x].jsonl"):
        write_jsonl(tmp_path / name, [1])

    def names(*patterns: str) -> list[str]:
        return [file.path.name for file in find_files([str(tmp_path / one) for one in patterns], "data.train")]

    assert braces("a{0..2}b{x,y}") == ["a0bx", "a0by", "a1bx", "a1by", "a2bx", "a2by"]
    assert braces("{008..010}") == ["008", "009", "010"]
    assert names("s_*.jsonl") == ["s_0.jsonl", "s_1.jsonl", "s_10.jsonl"]
    assert names("s_1.jsonl", "s_0.jsonl") == ["s_1.jsonl", "s_0.jsonl"] and names("[x].jsonl") == ["[x].jsonl"]
    for patterns, message in (
        (["s_{0..2}.jsonl"], r"data.train: the data file .*s_2.jsonl does not exist"),
        (["t_*.jsonl"], r"data.train: no file matches .*t_\*.jsonl"),
        (["s_0.jsonl", "s_*.jsonl"], r"names the file .*s_0.jsonl twice"),
        (["{3..1}.jsonl"], "count from 3 down to 1"),
        (["{3}.jsonl"], "write {a,b} or"),
        (["."], "is a folder; write"),
    ):
        with pytest.raises(ValueError, match=message):
            names(*patterns)
    with pytest.raises(ValueError, match=r"data.train = \[\] names no file"):
        find_files([], "data.train")
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="is compressed"):
        names("a.jsonl.gz")


def test_parquet_without_pyarrow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", [1], 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        find_files(str(tmp_path / "a.parquet"), "data.train")


def test_nulls_are_missing_fields_and_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"n": [1, 2, None], "m": ["x", None, "y"]}), path, row_group_size=2)
    rows = open_records(str(path), "data.train", dict)
    assert list(rows) == [{"n": 1, "m": "x"}, {"n": 2}, {"m": "y"}]

    def parse(row: Mapping[str, object]) -> object:
        if "n" not in row:
            raise ValueError("the field 'n' is missing")
        return row

    with pytest.raises(ValueError, match=r"a.parquet, row 3: the field 'n' is missing"):
        list(open_records(str(path), "data.train", parse))


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "a.parquet", range(100), 10)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"cut.parquet is not a whole Parquet file: its end is missing"):
        open_records(str(cut), "data.train", number)
    hole = tmp_path / "hole.parquet"
    data = bytearray(whole.read_bytes())
    data[4:300] = bytes(296)
    hole.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"hole.parquet, row group 0: "):
        list(open_records(str(hole), "data.train", number))
    text = tmp_path / "text.jsonl"
    text.write_bytes(b'{"n": 1}\n{"n": "\xff"}\n')
    with pytest.raises(ValueError, match=r"text.jsonl, line 2: no UTF-8 \(invalid start byte at byte 7\)"):
        list(open_records(str(text), "data.train", number))
    text.write_bytes(b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n')  # the mark that some editors begin a file with
    assert list(open_records(str(text), "data.train", number)) == [1, 2]
    (tmp_path / "nothing.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"nothing.jsonl is empty; at least one line is needed"):
        open_records([str(text), str(tmp_path / "nothing.jsonl")], "data.train", number)
    parquet.write_table(pyarrow.table({"n": pyarrow.array([], pyarrow.int64())}), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"none.parquet is empty; at least one row is needed"):
        open_records(str(tmp_path / "none.parquet"), "data.train", number)


def test_a_file_that_changes_while_it_is_used_is_refused(tmp_path: Path, in_small_blocks: None) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", range(1000))
    before = path.read_bytes()
    records = open_records(str(path), "data.train", number, window=1000)
    path.write_bytes(before)  # another time, the same content
    assert records[500] == 500
    for content in (before[:9000], before.replace(b'"n": 900', b'"n": 901'), b'{"n": -1}\n' + before):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.jsonl has changed since the run began"):
            _ = records[0], records[900]
        path.write_bytes(before)
    table = write_parquet(tmp_path / "b.parquet", range(1000), 10)
    rows = open_records(str(table), "data.train", number, window=1000)
    assert rows[500] == 500
    write_parquet(table, range(1, 1001), 10)
    with pytest.raises(ValueError, match=r"b.parquet has changed since the run began: its footer differs"):
        _ = rows[0], rows[900]


def test_the_fingerprint_is_of_content_and_order(tmp_path: Path, in_small_blocks: None) -> None:
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", range(100)) for name in "ab")

    def of(*paths: Path, window: int = 1000) -> str:
        return open_records([str(path) for path in paths], "data.train", number, window).fingerprint

    assert of(first) == of(second) != of(first, second)
    assert of(first) != of(first, window=2000)
    write_jsonl(second, [*range(99), 98])
    assert of(first) != of(second) and of(first, second) != of(second, first)


@small_blocks
def _index_and_check(rank: int, patterns: list[str], odd: str | None) -> tuple[Entries, int, list[int]]:
    seen: list[int] = []
    if odd is not None and rank == 1:
        patterns = [odd]
    records = open_records(patterns, "data.train", number, window=4096)
    longest, part = check(records, lambda n: n, on_batch=lambda place, batch: seen.extend(batch))
    assert part == 1.0 and records.stream([5, 999], seed=2) == Records(
        records.files, records.index, number, 4096
    ).stream([5, 999], seed=2)
    return records.index, longest, seen


def test_ranks_share_the_work_and_agree(mixed: list[str], tmp_path: Path) -> None:
    [(alone, longest, seen)] = run_world(1, _index_and_check, mixed, None)
    assert longest == 999 and seen == list(range(1000))
    found = run_world(4, _index_and_check, mixed, None)
    for theirs, most, _ in found:
        assert np.array_equal(theirs, alone) and most == 999
    assert [n for _, _, part in found for n in part] == list(range(1000))
    assert all(len(part) > 80 for _, _, part in found)
    # another file on one rank
    other = write_jsonl(tmp_path / "other.jsonl", range(10))
    with pytest.raises(WorldError) as failure:
        run_world(2, _index_and_check, mixed, str(other))
    assert sorted(failure.value.errors) == [0, 1]
    assert all("data.train differs between the ranks 1 and 0" in error for error in failure.value.errors.values())
    # a bad line in the part of one rank
    lines = (tmp_path / "a_0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a_0.jsonl").write_text("".join([*lines[:70], '{"n": "x"}\n', *lines[71:]]))
    with pytest.raises(WorldError) as failure:
        run_world(4, _index_and_check, mixed, None)
    assert sorted(failure.value.errors) == [0, 1, 2, 3]
    assert all("a_0.jsonl, line 71: n = 'x' is not valid" in error for error in failure.value.errors.values())


def test_what_exceeds_the_budget_is_checked_evenly_and_then_when_read(tmp_path: Path, in_small_blocks: None) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", range(2000))
    records = open_records(str(path), "data.train", number)
    chosen = spread_blocks(records.index, records.bytes / 10)
    assert len(chosen) == pytest.approx(len(records.index) / 10, rel=0.1)
    assert np.diff(chosen).max() <= 12 and chosen[0] == 0 and chosen[-1] == len(records.index) - 1
    left_out = next(block for block in range(len(records.index)) if block not in chosen)
    line = records.first_of(left_out)
    path.write_text(path.read_text().replace(f'"n": {line},', f'"n": {str(line)!r},'.replace("'", '"')))
    records = open_records(str(path), "data.train", number)
    _, part = check(records, lambda n: 1, records.bytes / 10)
    assert part == pytest.approx(0.1, rel=0.1)
    with pytest.raises(ValueError, match=rf"a.jsonl, line {line + 1}: n = '{line}' is not valid"):
        check(records, lambda n: 1)
    with pytest.raises(ValueError, match=rf"a.jsonl, line {line + 1}: n = '{line}' is not valid"):
        records.stream(range(len(records)), seed=0)


@pytest.mark.parametrize("kind", [pytest.param("jsonl", marks=pytest.mark.slow), "parquet"])
def test_memory_does_not_grow_with_the_file(kind: str, tmp_path: Path) -> None:
    """6 MB of records through a window of 256 KiB, in passes over every tenth record of the stream."""
    size, window = 30_000, 1 << 18
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(f'{{"n": {n}, "text": "{n:0180d}"}}\n' for n in range(size)))
    else:
        table = pyarrow.table({"n": range(size), "text": [f"{n:0180d}" for n in range(size)]})
        parquet.write_table(table, path, row_group_size=200, use_dictionary=False, compression="none")
        del table
    assert path.stat().st_size > 5.5e6

    def held() -> int:
        return tracemalloc.get_traced_memory()[0] + pyarrow.total_allocated_bytes()

    open_records(str(path), "data.train", number, window).stream([0], seed=0)  # imports and their like
    tracemalloc.start()
    try:
        start, found = held(), []
        records = open_records(str(path), "data.train", number, window)
        check(records, lambda n: 1)
        for step in range(0, 2 * size, size // 10):
            records.stream(range(step, step + size // 10, 10), seed=0)
            found.append(held() - start)
        peak = tracemalloc.get_traced_memory()[1] - start
    finally:
        tracemalloc.stop()
    assert max(found) < 2 * window and peak < 3 * window and max(found) < 1.3 * found[0]


def test_records_do_without_a_file() -> None:
    assert len(Records()) == 0 and list(Records()) == [] and Records().bytes == 0


def test_an_index_is_small(tmp_path: Path) -> None:
    assert files.stretch(10**6) == 1 << 16 and files.stretch(10**12) == 1 << 22
    assert 10**12 / files.stretch(10**12) * files.ENTRY.itemsize < 10e6  # bytes for a terabyte
    assert (
        source.AT_ONCE <= 1024 and index_of(find_files(str(write_jsonl(tmp_path / "a.jsonl", [1])), "x"), "x").size == 1
    )
