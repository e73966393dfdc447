"""Tiny runs of the real trainer by the real script, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
SCRIPT = "slurm/train.sbatch"
CONFIG = "configs/grpo_arithmetic.yaml"
TINY = {
    "evaluation": "null",
    "warmup": "null",
    "data": "{rollouts: configs/data/arithmetic_rollouts.jsonl}",
    "model.hidden": 32,
    "batch.micro_batch_size": 8,
    "rl.prompts": 2,
    "rl.updates": 1,
    "run.checkpoint_every": 1,
    "run.keep_checkpoints": 3,
}
# nothing is compiled here, and Megatron's import asks for the compiler: over a second of each process
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
# of a run, not of what it computed
CLOCK = {"seconds", "tokens_per_second"}
Rows = list[dict[str, float | int | str]]


def arguments(folder: Path, steps: int, parallel: str = "{}", **more: object) -> list[str]:
    """CONFIG and its overrides; `__` stands for the dot."""
    given = {name.replace("__", "."): value for name, value in more.items()}
    options = {**TINY, "run.dir": folder, "rl.steps": steps, "parallel": parallel, **given}
    return [CONFIG, *(f"--{name}={value}" for name, value in options.items())]


def submit(
    cluster: Cluster,
    logs: Path,
    nodes: int,
    given: Sequence[str],
    *options: str,
    env: Mapping[str, str] | None = None,
    servers: int = 0,
) -> int:
    """`sbatch OPTIONS slurm/train.sbatch GIVEN` from the repository's root, one gloo rank a node; the job's id.

    With `servers`, nodes of their own for them: slurm/with_server.sbatch.
    """
    logs.mkdir(parents=True, exist_ok=True)
    settings = {
        "LOG_DIR": str(logs),
        "PYTHON": sys.executable,
        "NPROC_PER_NODE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "GATE_SECONDS": "120",  # the machine may be busy
        **UNCOMPILED,
        **(env or {}),
    }
    sizes = [f"--nodes={nodes}", "--gpus-per-node=8", "--cpus-per-task=16", f"--output={logs}/batch.out"]
    beside = [":", f"--nodes={servers}", "--gpus-per-node=8", "--cpus-per-task=16"] if servers else []
    script = "slurm/with_server.sbatch" if servers else SCRIPT
    return cluster.submit(*sizes, *options, *beside, script, *given, cwd=ROOT, env=settings)


def alone(given: Sequence[str]) -> None:
    """The same run in one process, without Slurm."""
    command = [sys.executable, "-m", "parallel_rl.cli", "train", *given]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **UNCOMPILED}, check=True, timeout=300)


def curve(folder: Path) -> Rows:
    """The rows of metrics.jsonl, without what the clock says."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def words(logs: Path) -> str:
    """All that a job wrote to its logs."""
    files = [path for path in sorted(logs.rglob("*")) if path.is_file() and path.suffix in (".out", ".log")]
    return "\n".join(f"=== {path.relative_to(logs)}\n{path.read_text(errors='replace')}" for path in files)


def last_line(logs: Path) -> str:
    """What the batch script says of the job's end."""
    lines = (logs / "batch.out").read_text().splitlines()
    return lines[-1] if lines else ""


def checked(cluster: Cluster, number: int, logs: Path, wanted: str = "COMPLETED", timeout: float = 400.0) -> str:
    """Waits for a job's end; all logs are in the error where it is another than `wanted`. Gives what the job said."""
    try:
        state = cluster.wait(number, timeout=timeout)
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{words(logs)}") from None
    said = words(logs)
    assert state == wanted, f"job {number} is {state}, not {wanted}\n{said}"
    return said
