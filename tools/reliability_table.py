"""Writes docs/reliability.md from the outcomes that the fault tests reported: python -m tools.reliability_table REPORT.jsonl"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.slurm.faults import FAULTS, Fault

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "reliability.md"
Outcome = Mapping[str, object]

INTRODUCTION = """# Failures and recovery

This table lists what may happen to a job on a cluster, and how the job recovered when it happened. `make soak` makes
the table from `tests/slurm/test_faults.py`, which does this to real jobs. `slurm/train.sbatch` runs them on two of the
three nodes of a private Slurm cluster on one machine. The trainer runs on gloo in float32 with a checkpoint at each
step. The fault happens at a random instant of the run, of the check before the run, or of the gate (`train --gate`).
The test holds the processes at this instant until the fault has reached them.

A case passes if the logs name the culprit and the cause, and the completed run contains each step in `metrics.jsonl`
exactly once. Its numbers are bit-equal to those of a run without a fault. (At another layout they are within 1e-5;
`tests/training` verifies this.) Seconds are from the fault to the state of the job, with other jobs on the same
cores.

A job that is queued again resumes automatically. After FAILED or CANCELLED submit the same command, and the run
resumes from its last checkpoint.

`tests/slurm/test_servers.py` does the same to rollout servers (`slurm/with_server.sbatch`): it kills a server twice,
and cancels the job.

| what happens | how it is done | the job is then | after | what its logs say | times |
|---|---|---|--:|---|--:|
"""
STATES = {"PENDING": "queued again", "FAILED": "FAILED", "CANCELLED": "CANCELLED"}


def document(outcomes: Sequence[Outcome]) -> str:
    """The whole file.

    Raises:
        ValueError: a fault without an outcome.
    """
    seeds = sorted({str(outcome["FAULT_SEED"]) for outcome in outcomes})
    end = f"\n{datetime.date.today()}; again with the same instants: `FAULT_SEED={' or '.join(seeds)} make soak`\n"
    return INTRODUCTION + "".join(_row(fault, outcomes) for fault in FAULTS) + end


def _row(fault: Fault, outcomes: Sequence[Outcome]) -> str:
    found = [outcome for outcome in outcomes if outcome["fault"] == fault.name]
    if not found:
        raise ValueError(
            f"no outcome of {fault.name!r} in the report; run the whole of `make soak` (as root: one needs a mount)"
        )
    states = " or ".join(sorted({STATES[str(outcome["state"])] for outcome in found}))
    seconds = sorted(float(str(outcome["ended_after"])) for outcome in found)
    after = (
        f"{seconds[0]:.0f} s" if round(seconds[0]) == round(seconds[-1]) else f"{seconds[0]:.0f}–{seconds[-1]:.0f} s"
    )
    said = str(found[-1]["said"]).replace("|", r"\|")
    return f"| {fault.name} | {fault.how} | {states} | {after} | `{said}` | {len(found)} |\n"


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    FILE.write_text(document([json.loads(line) for line in lines]), encoding="utf-8")
