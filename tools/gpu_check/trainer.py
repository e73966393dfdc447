"""Stage trainer: short runs of one NCCL rank and of ranks that share a card, each dtype, the fused head, and resumed.

Every run sees one card.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.gpu_check.facts import Facts

_STEPS = 2
_ALONE, _SHARED = "{}", "{tensor: 2, context: 2, sequence_parallel: true}"
#: name → ranks, backend, layout, further options; the first goes on from its checkpoint, too
_RUNS: Mapping[str, tuple[int, str, str, tuple[str, ...]]] = {
    "float32": (1, "", _ALONE, ()),
    "bfloat16": (1, "", _ALONE, ("--run.dtype=bfloat16",)),
    "bfloat16, fused head": (1, "", _ALONE, ("--run.dtype=bfloat16", "--model.fused_head=true")),
    "float32, TP 2 x CP 2 on one card": (4, "gloo", _SHARED, ()),
    "bfloat16, fused head, TP 2 x CP 2 on one card": (
        4, "gloo", _SHARED, ("--run.dtype=bfloat16", "--model.fused_head=true"),
    ),
}  # fmt: skip
_SMALL = ("--model.layers=1", "--model.hidden=16", "--rl.prompts=4", "--rl.group_size=2", "--rl.updates=1")
_LIMIT, _GRACE = 60.0, 15.0  # seconds of one run, and to end it


def run(facts: Facts, device: str) -> None:
    """Each run in a folder of its own; on a CPU the first alone, on one small model."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (ranks, backend, layout, options)) in enumerate(_RUNS.items()):
            if device == "cpu" and number:
                break
            into = Path(folder) / str(number)
            more = (*options, *_SMALL) if device == "cpu" else options
            done = _train(facts, name, into, ranks, backend, (f"--parallel={layout}", *more), _STEPS)
            if number == 0 and done:
                before = _rows(into)
                further, on = f"{name}, on from its checkpoint", (f"--parallel={layout}", *more)
                if _train(facts, further, into, ranks, backend, on, _STEPS + 1):
                    # one that started over would have each row anew, with the times of its own steps
                    kept = _rows(into)[:-1] == before
                    facts.check(f"{further}: it added a row to those of before", kept, "it started over")


def _rows(folder: Path) -> list[dict[str, float | int | str]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _train(
    facts: Facts, name: str, folder: Path, ranks: int, backend: str, options: tuple[str, ...], steps: int
) -> bool:
    """Run the trainer until RL step `steps`; whether it came there."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "parallel_rl.cli", "train", "configs/grpo_arithmetic.yaml", "--evaluation=null", f"--run.dir={folder}"),
        *(f"--warmup.steps={_STEPS}", f"--rl.steps={steps}", "--warmup.batch_size=16", *options),
    ]
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # else ranks over gloo spread over all cards
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PARALLEL_RL_BACKEND": backend, "CUDA_VISIBLE_DEVICES": card}
    status, text = ended_within(_LIMIT, command, environment)
    if status is None:
        facts.check(name, False, f"not done after {_LIMIT:.0f} s")
        return False
    if status:
        lines = [line for line in text.splitlines() if "rror" in line]
        facts.check(name, False, lines[0] if lines else f"status {status}")
        return False
    rows = [row for row in _rows(folder) if row["phase"] == "rl"]
    came = [row["step"] for row in rows] == list(range(1, steps + 1))
    facts.check(name, came, f"its RL steps are {[row['step'] for row in rows]}")
    if came:
        facts.tell(f"{name}, last step", rows[-1]["tokens_per_second"], "tokens/s")
    return came


def ended_within(limit: float, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int | None, str]:
    """A command's status and what it printed, or None where it was stopped: torchrun is asked first, it ends its ranks."""
    with subprocess.Popen(  # nosec B603 # no shell
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            text = process.communicate(timeout=limit)[0]
            return process.returncode, text
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_GRACE)
            process.kill()
            return None, ""
