"""A large data set through a window: records checked and read a second, and resident memory from step to step.

Demonstrations with lognormal lengths are written as JSONL, as Parquet and as what the library `datasets` saves, several shards
each. "dataset" is the same Parquet, read through `{dataset: ...}`. The kinds take turns, and the fastest round counts.
`parallel_rl.training.preflight.dry_run` in a process of its own checks them all as a run does and then reads what its steps
read. `--check` holds that from step 100 on memory stays as it is, and that
`datasets` gives at least 0.8 of the records a second that Parquet gives. `python -m benchmarks.data --help`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.report import add_report_options, report
from parallel_rl.training.config.load import load_config
from parallel_rl.training.preflight.dry_run import Progress, dry_run, resident

CONFIG = Path(__file__).parent.parent / "configs" / "sft_arithmetic.yaml"
KINDS = ("jsonl", "parquet", "saved", "dataset")
RECORDS = "records"  # the folder of the files
OF_LIBRARY = ("saved", "dataset")  # read by `datasets`
LEAST_SHARE = 0.8  # of the records a second of Parquet
SHARDS = 4
GROUP = 20_000  # rows in a row group
MEDIAN, SIGMA, LONGEST = 128, 0.7, 2000  # characters of an answer
FLAT_FROM = 100  # steps: the window is full, everything is imported
GROWTH = 1.02
MEGABYTES = 10  # above that share, what the allocator may keep
SECONDS = 120  # to check a million records in one process; twice that of two ranks


@dataclass(frozen=True)
class Figures:
    """Figures of one kind of file: bytes on disk, seconds to index and check all records, resident bytes then, progress."""

    bytes: int
    checked: float
    memory: int
    steps: list[Progress]

    @property
    def speed(self) -> float:
        """Return the records a second that the steps read."""
        return self.steps[-1].records / self.steps[-1].seconds


def write_shards(folder: Path, kind: str, records: int) -> None:
    """Write `records` demonstrations in SHARDS files, the same ones of each kind."""
    (folder / RECORDS).mkdir()
    rng = random.Random(0)
    digits = "".join(rng.choice("0123456789") for _ in range(10 * LONGEST))
    for shard in range(SHARDS):
        count = (shard + 1) * records // SHARDS - shard * records // SHARDS
        rows = _rows(rng, digits, count)
        path = folder / RECORDS / f"part_{shard:03d}.{'jsonl' if kind == 'jsonl' else 'parquet'}"
        if kind == "jsonl":
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            _write_parquet(path, rows)
    if kind == "saved":
        _save(folder / RECORDS)


def _save(folder: Path) -> None:
    """Save the Parquet files with the library `datasets`, and delete them."""
    import datasets
    import pyarrow
    import pyarrow.parquet as parquet

    paths = sorted(folder.glob("*.parquet"))
    table = pyarrow.concat_tables([parquet.read_table(path) for path in paths])
    datasets.disable_progress_bars()
    for path in paths:
        path.unlink()
    datasets.Dataset(table).save_to_disk(str(folder), num_shards=SHARDS)


def _rows(rng: random.Random, digits: str, count: int) -> Iterator[dict[str, str]]:
    for _ in range(count):
        length = min(LONGEST, max(1, round(MEDIAN * rng.lognormvariate(0, SIGMA))))
        start = rng.randrange(len(digits) - length)
        yield {"prompt": f"{rng.randrange(10**9)}=", "answer": digits[start : start + length]}


def _write_parquet(path: Path, rows: Iterator[dict[str, str]]) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    schema = pyarrow.schema([("prompt", pyarrow.string()), ("answer", pyarrow.string())])
    with parquet.ParquetWriter(path, schema) as writer:
        while table := [row for _, row in zip(range(GROUP), rows, strict=False)]:
            writer.write_table(pyarrow.Table.from_pylist(table, schema=schema), row_group_size=GROUP)


def measure(folder: str, kind: str, steps: int, batch: int, buffer: int) -> Figures:
    """Run the steps' reading in this process."""
    os.environ |= {"HF_DATASETS_CACHE": f"{folder}/cache", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    files = Path(folder) / RECORDS
    source = f"{{dataset: '{files}'}}" if kind in OF_LIBRARY else f"'{files}/part_*.{kind}'"
    overrides = {
        "data": f"{{examples: {source}, buffer_megabytes: {buffer}, check_gigabytes: 1000}}",
        "evaluation": "null",
        "model.max_positions": LONGEST + 20,
        "batch": "{packing: true, tokens: 4096}",
        "sft.batch_size": batch,
        "parallel": "{}",
    }
    config = load_config(str(CONFIG), [f"--{key}={value}" for key, value in overrides.items()])
    began, reports = time.monotonic(), list[tuple[float, int]]()
    found = list(dry_run(config, steps, lambda line: reports.append((time.monotonic() - began, resident()))))
    return Figures(sum(path.stat().st_size for path in files.iterdir()), *reports[0], found)


def measure_alone(*arguments: object) -> Figures:
    """`measure` in a new process, so that its memory is its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def missed(results: dict[str, Figures], records: int) -> list[str]:
    """List the missed figures."""
    lines = []
    for kind, figures in results.items():
        flat = [done for done in figures.steps if done.step >= FLAT_FROM]
        for done in flat[1:]:
            if done.memory > GROWTH * flat[0].memory + MEGABYTES * 1e6:
                lines.append(
                    f"{kind}: {done.memory / 1e6:.0f} MB at step {done.step}, {flat[0].memory / 1e6:.0f} at step {flat[0].step}"
                )
        if figures.checked > SECONDS * records / 1e6:
            lines.append(f"{kind}: {records} records are checked in {figures.checked:.0f} s")
        least = LEAST_SHARE * results["parquet"].speed if kind in OF_LIBRARY and "parquet" in results else 0.0
        if figures.speed < least:
            lines.append(f"{kind}: {figures.speed:.0f} records/s, below {least:.0f}, {LEAST_SHARE} of Parquet's")
    return lines


def make_table(results: dict[str, Figures]) -> Table:
    made = Table("file", title="Memory (MB) after so many steps, one process")
    steps = [done.step for done in next(iter(results.values())).steps]
    for column in ("MB", "s to check", "checked", *(f"step {step}" for step in steps), "records/s", "filled"):
        made.add_column(column, justify="right")
    for kind, figures in results.items():
        last = figures.steps[-1]
        made.add_row(
            kind,
            f"{figures.bytes / 1e6:.0f}",
            f"{figures.checked:.1f}",
            f"{figures.memory / 1e6:.0f}",
            *(f"{done.memory / 1e6:.0f}" for done in figures.steps),
            f"{figures.speed:.0f}",
            f"{last.filled:.1%}",
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=64, help="records a step")
    parser.add_argument("--buffer", type=int, default=64, help="data.buffer_megabytes")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each kind of file")
    add_report_options(parser, growth=False)
    options = parser.parse_args(arguments)
    results: dict[str, Figures] = {}
    with contextlib.ExitStack() as folders:
        places = {kind: folders.enter_context(tempfile.TemporaryDirectory()) for kind in KINDS}
        for kind, folder in places.items():
            write_shards(Path(folder), kind, options.records)
        for _ in range(options.rounds):
            for kind, folder in places.items():
                figures = measure_alone(folder, kind, options.steps, options.batch, options.buffer)
                if kind not in results or figures.speed > results[kind].speed:
                    results[kind] = figures
    sizes = {name: getattr(options, name) for name in ("records", "steps", "batch", "buffer", "rounds")}
    lines = missed(results, options.records)
    bars = {
        "MB of memory": {
            f"{kind}, step {done.step}": done.memory / 1e6 for kind, row in results.items() for done in row.steps
        }
    }
    found = {kind: asdict(figures) for kind, figures in results.items()}
    return report(options, sizes, [make_table(results)], found, lines, bars)


if __name__ == "__main__":
    sys.exit(main())
