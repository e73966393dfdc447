"""What is wrong with a run's files is said within a minute of its job's start, and nothing of what stood there is touched.

(What the config, the layout, the allocation and names of files alone tell is in test_runs.py and test_scripts.py; other
damage to data and checkpoints is in tests/training/data and tests/training/checkpointing.)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import ROOT, arguments, checked, submit

pytestmark = pytest.mark.slurm
ROLLOUTS = ROOT / "configs/data/arithmetic_rollouts.jsonl"
Overrides = dict[str, object]


@dataclass
class Good:
    """A run that is done, and what may be used of it."""

    cluster: Cluster
    run: Path
    seconds: float = 0.0  # of its job

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.run, self.cluster.folder / name))

    @property
    def checkpoint(self) -> Path:
        return max((self.run / "checkpoints").iterdir())


def _another_to_go_on(good: Good) -> Overrides:
    return {"run.dir": good.copy("going-on"), "model.hidden": 16}


def _damaged(good: Good) -> Overrides:
    bad = good.copy("damaged") / good.checkpoint.relative_to(good.run)
    largest = max((path for path in bad.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return {"run.dir": good.copy("whole"), "run.init_from": bad, "run.resume": "never"}


def _jsonl(good: Good) -> Overrides:
    lines = ROLLOUTS.read_text().splitlines()
    lines[6] = lines[6][:40]
    shard = good.cluster.folder / "bad.jsonl"
    shard.write_text("\n".join(lines) + "\n")
    return {"run.dir": good.copy("jsonl"), "data": f"{{rollouts: {shard}}}", "run.resume": "never"}


def _full(good: Good) -> Overrides:
    run = Path(shutil.copytree(good.run, good.cluster.disk / "run"))
    with (good.cluster.disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return {"run.dir": run}


CASES: Mapping[str, tuple[Callable[[Good], Overrides], str]] = {
    "a checkpoint of another model in run.dir": (
        _another_to_go_on,
        r"run\.dir holds the checkpoint \S+.* of another run: model\.hidden is 32 there and 16 in this run",
    ),
    "run.init_from is damaged": (
        _damaged,
        r"run\.init_from = '\S+' cannot be used: \S+ is damaged: \S+ does not match",
    ),
    "a line is cut off": (_jsonl, r"bad\.jsonl, line 7: no JSON"),
    "a full disk": (_full, r"run\.dir = '\S+': a checkpoint takes [\d.]+ \wB and [\d.]+ \w*B are free"),
}


@dataclass
class Started:
    good: Good
    job: int
    run: Path
    logs: Path
    before: Mapping[str, str]


@pytest.fixture(scope="module")
def started() -> Iterator[Mapping[str, Started]]:
    """All of them in the queue of one cluster, behind a run that is good."""
    with Cluster(nodes=2, disk=4 if os.getuid() == 0 else None) as cluster:
        good = Good(cluster, cluster.folder / "good")
        number = submit(cluster, cluster.folder / "good-logs", 1, arguments(good.run, 1))
        checked(cluster, number, cluster.folder / "good-logs")
        good.seconds = _seconds(cluster, number)
        found = {}
        for name, (make, _) in CASES.items():
            if why := _cannot(name):
                print(why)
                continue
            more = make(good)
            run, logs = Path(str(more.pop("run.dir"))), cluster.folder / f"logs-{len(found)}"
            before = _content(run)
            given = arguments(run, 2, **more)
            found[name] = Started(good, submit(cluster, logs, 1, given), run, logs, before)
        yield found


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_said_within_a_minute_and_changes_nothing(name: str, started: Mapping[str, Started]) -> None:
    """May take a minute: the job starts its ranks before it refuses, and a minute is what it promises."""
    if why := _cannot(name):
        pytest.skip(why)
    one, (_, says) = started[name], CASES[name]
    said = checked(one.good.cluster, one.job, one.logs, "FAILED", timeout=900)
    assert re.search(f"parallel-rl: error.*{says}", said), said
    [last] = (one.logs / "batch.out").read_text().splitlines()[-1:]
    assert re.match(f"parallel-rl: job {one.job} failed", last), said
    assert _content(one.run) == one.before
    # where others use the machine, what a good run takes is the measure
    assert _seconds(one.good.cluster, one.job) <= max(60.0, 4 * one.good.seconds)


def _cannot(name: str) -> str | None:
    if name == "a full disk" and os.getuid() != 0:
        return "only root can mount a small disk"
    return None


def _seconds(cluster: Cluster, number: int) -> float:
    """By Slurm's clock, from the job's start to its end."""
    job = cluster.job(number)
    return (datetime.fromisoformat(job["EndTime"]) - datetime.fromisoformat(job["StartTime"])).total_seconds()


def _content(folder: Path) -> Mapping[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
