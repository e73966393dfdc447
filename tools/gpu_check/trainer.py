"""Stage trainer: short runs of one NCCL rank and of ranks that share a card, each dtype, the fused head, and resumed.

Every run sees one card, which all share: most of a run is its start, and one that hangs takes no time from the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tools.gpu_check.facts import Facts


class _Run(NamedTuple):
    ranks: int
    backend: str
    layout: str
    options: tuple[str, ...] = ()


_STEPS = 2
_ALONE, _SHARED = "{}", "{tensor: 2, context: 2, sequence_parallel: true}"
_BFLOAT16, _FUSED = "--run.dtype=bfloat16", "--model.fused_head=true"
#: by name; the first also resumes from its checkpoint
_RUNS: Mapping[str, _Run] = {
    "float32": _Run(1, "", _ALONE),
    "bfloat16": _Run(1, "", _ALONE, (_BFLOAT16,)),
    "bfloat16, fused head": _Run(1, "", _ALONE, (_BFLOAT16, _FUSED)),
    "float32, TP 2 x CP 2 on one card": _Run(4, "gloo", _SHARED),
    "bfloat16, fused head, TP 2 x CP 2 on one card": _Run(4, "gloo", _SHARED, (_BFLOAT16, _FUSED)),
}
_SMALL = ("--model.layers=1", "--model.hidden=16", "--rl.prompts=4", "--rl.group_size=2", "--rl.updates=1")
_LIMIT, _GRACE = 70.0, 10.0  # seconds of one run, and to end it
_SHOWN = 6000  # characters of what a run that failed printed last


def run(facts: Facts, device: str) -> None:
    """Start all runs at once in separate folders, then resume the first; on a CPU run only one small model."""
    first = next(iter(_RUNS))
    runs = _RUNS if device == "cuda" else {first: _RUNS[first]._replace(options=_SMALL)}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(runs)) as threads:
        into = {name: Path(folder) / str(number) for number, name in enumerate(runs)}
        under_way = {threads.submit(_train, one, into[name], _STEPS): name for name, one in runs.items()}
        done = []
        for one in as_completed(under_way):
            name = under_way[one]
            if _tell(facts, name, into[name], _STEPS, *one.result()):
                done.append(name)
        if first not in done:
            return
        before, further = _rows(into[first]), f"{first}, on from its checkpoint"
        if _tell(facts, further, into[first], _STEPS + 1, *_train(runs[first], into[first], _STEPS + 1)):
            # a run that started over would rewrite each row with new step times
            kept = _rows(into[first])[:-1] == before
            facts.check(f"{further}: it added a row to those of before", kept, "it started over")


def _rows(folder: Path) -> list[dict[str, float | int | str]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _train(one: _Run, folder: Path, steps: int) -> tuple[int | None, str]:
    """Run the trainer until RL step `steps`."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(one.ranks)),
        *("-m", "parallel_rl.cli", "train", "configs/grpo_arithmetic.yaml", "--evaluation=null", f"--run.dir={folder}"),
        *(f"--warmup.steps={_STEPS}", f"--rl.steps={steps}", "--warmup.batch_size=16", f"--parallel={one.layout}"),
        *one.options,
    ]
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # else ranks over gloo spread over all cards
    hidden = {"OMP_NUM_THREADS": "1", "PARALLEL_RL_BACKEND": one.backend, "CUDA_VISIBLE_DEVICES": card}
    return ended_within(_LIMIT, command, {**os.environ, **hidden})


def _tell(facts: Facts, name: str, folder: Path, steps: int, status: int | None, text: str) -> bool:
    """Report how a run ended, with a failed run's output; return whether it reached RL step `steps`."""
    if status != 0:
        print(text[-_SHOWN:], flush=True)
        why = f"not done after {_LIMIT:.0f} s" if status is None else _error(text) or f"status {status}"
        facts.check(name, False, why)
        return False
    rows = [row for row in _rows(folder) if row["phase"] == "rl"]
    came = [row["step"] for row in rows] == list(range(1, steps + 1))
    facts.check(name, came, f"its RL steps are {[row['step'] for row in rows]}")
    if came:
        facts.tell(f"{name}, last step", rows[-1]["tokens_per_second"], "tokens/s")
    return came


def _error(text: str) -> str:
    """Find the first line of an error that is not an indented traceback line."""
    lines = (re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines())
    return next((line for line in lines if "rror" in line and not line[0].isspace()), "")


def ended_within(limit: float, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Run a command; return its status (None if stopped) and output. SIGTERM first lets torchrun end its ranks."""
    with (
        tempfile.NamedTemporaryFile() as told,
        subprocess.Popen(command, env=environment, stdout=told, stderr=subprocess.STDOUT) as process,  # nosec B603 # no shell
    ):
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit)
        if status is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            process.kill()
        return status, Path(told.name).read_text(encoding="utf-8", errors="replace")
