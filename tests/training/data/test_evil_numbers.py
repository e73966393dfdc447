"""Numbers and nesting that no record has: an error with file and line, the same on every rank, and nothing overflows later."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from parallel_rl.testing.pool import run_world
from parallel_rl.training.data.checking import check
from parallel_rl.training.data.datasets import find_files
from parallel_rl.training.data.examples import Rollout, parse_rollout
from parallel_rl.training.data.records.source import index_of
from tests.training.data.small_blocks import open_records, small_blocks

GOOD = {"tokens": [1, 2, 3], "logprobs": [-0.5, -0.5], "group": 2**63 - 1, "reward": 1.5, "staleness": -(2**63)}
ROWS: dict[str, tuple[str, str]] = {
    "huge group": (json.dumps({**GOOD, "group": 10**400}), "group = 1000"),
    "group": (json.dumps({**GOOD, "group": 2**63}), "group = 9223372036854775808 is not valid; an integer of 64 bits"),
    "staleness": (json.dumps({**GOOD, "staleness": -(2**63) - 1}), "staleness = -9223372036854775809 is not valid"),
    "run": (json.dumps({**GOOD, "run": 2**64}), "run = 18446744073709551616 is not valid; an integer of 64 bits"),
    "segments": (json.dumps({**GOOD, "segments": [0, 2**63]}), "segments[1] = 9223372036854775808 is not valid"),
    "token": (json.dumps({**GOOD, "tokens": [1, 2, 10**400]}), "tokens[2] = 1000"),
    "reward": (json.dumps({**GOOD, "reward": 1e39}), "reward = 1e+39 is not valid; a number that is finite in float32"),
    "huge reward": (json.dumps({**GOOD, "reward": -(10**400)}), "reward = -1000"),
    "logprob": (json.dumps({**GOOD, "logprobs": [-0.5, -1e39]}), "logprobs[1] = -1e+39 is not valid"),
    "huge logprob": (json.dumps({**GOOD, "logprobs": [-0.5, -(10**400)]}), "logprobs[1] = -1000"),
    "nan": (json.dumps({**GOOD, "logprobs": [-0.5, float("nan")]}), "logprobs[1] = nan is not valid"),
    "brackets": ("[" * 200_000, "brackets are nested deeper than"),
    "brackets in a field": ('{"group": ' + "[" * 200_000 + "]" * 200_000 + "}", "brackets are nested deeper than"),
    "key twice": ('{"group": 1, "group": 2}', "duplicate key 'group'"),
    "key twice below": ('{"group": {"a": 1, "a": 2}}', "duplicate key 'a'"),
    "digits": ('{"group": ' + "9" * 5000 + "}", "an integer has more digits than Python reads"),
    "list": ('{"tokens": {"a": 1}}', "'tokens' = {'a': 1} is not valid; a list is needed"),
}


def write(folder: Path) -> None:
    """Each evil row as line 150 of 200 in a file of its own: in the second rank's part."""
    for name, (row, _) in ROWS.items():
        lines = [json.dumps(GOOD)] * 200
        lines[149] = row
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


@small_blocks
def refusals(rank: int, folder: str) -> dict[str, str]:
    """What the check of each file says on this rank."""
    said = {}
    for name in ROWS:
        records = open_records(f"{folder}/{name}.jsonl", "data.rollouts", partial(parse_rollout, vocab_size=9))
        try:
            check(records, lambda record: len(record.tokens))
        except ValueError as error:
            said[name] = str(error)
    return said


def test_each_is_an_error_with_file_and_line_on_every_rank(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = run_world(2, refusals, str(tmp_path))
    assert first == second and first.keys() == ROWS.keys()
    for name, (_, message) in ROWS.items():
        assert f"{name}.jsonl, line 150: " in first[name] and message in first[name], first[name][:300]
        assert len(first[name]) < 500, name


def test_what_64_and_32_bits_hold_is_taken() -> None:
    found = parse_rollout({**GOOD, "reward": 3.4e38, "logprobs": [-3.4e38, 0]}, 9)
    assert isinstance(found, Rollout) and (found.group, found.staleness) == (2**63 - 1, -(2**63))


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    """Of two columns of one name the first was lost without a word."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["group", "group"])
    parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice\.parquet: the column 'group' occurs twice"):
        index_of(find_files(str(tmp_path / "twice.parquet"), "data.rollouts"), "data.rollouts")
