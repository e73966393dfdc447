"""The benchmark of large data tells what grows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import data
from parallel_rl.training.preflight.dry_run import Progress


def _figures(*memory: int, checked: float = 1.0) -> data.Figures:
    steps = [Progress("sft", 10**power, 1, 1, 1.0, 1.0, size * 10**6) for power, size in enumerate(memory)]
    return data.Figures(1, checked, 1, steps)


def test_it_tells_which_figure_is_missed() -> None:
    # until step 100 the window fills
    assert data.missed({"jsonl": _figures(100, 200, 500, 510, 515)}, 10**6) == []
    (line,) = data.missed({"jsonl": _figures(500, 500, 500, 510, 540)}, 10**6)
    assert line == "jsonl: 540 MB at step 10000, 500 at step 100"
    (line,) = data.missed({"parquet": _figures(1, 1, 1, checked=2.0)}, 10**3)
    assert line == "parquet: 1000 records are checked in 2 s"
    parquet, saved = _figures(1), _figures(1)
    slow = dataclasses.replace(saved, steps=[dataclasses.replace(saved.steps[0], seconds=1.3)])
    assert data.missed({"parquet": parquet, "saved": saved}, 10**6) == []
    assert data.missed({"parquet": parquet, "saved": slow}, 10**6) == ["saved: 1 records/s, below 1, 0.8 of Parquet's"]


@pytest.mark.parametrize("kind", data.KINDS)
def test_it_measures_what_it_writes(kind: str, tmp_path: Path) -> None:
    if kind != "jsonl":
        pytest.importorskip("pyarrow" if kind == "parquet" else "datasets")
    data.write_shards(tmp_path, kind, 300)
    figures = data.measure(str(tmp_path), kind, steps=10, batch=32, buffer=1)
    assert figures.bytes == sum(path.stat().st_size for path in (tmp_path / data.RECORDS).iterdir()) > 0
    assert [(done.step, done.records) for done in figures.steps] == [(1, 32), (10, 320)]
    assert len(data.make_table({kind: figures}).rows) == 1
    assert data.missed({kind: dataclasses.replace(figures, checked=0.0)}, 300) == []
