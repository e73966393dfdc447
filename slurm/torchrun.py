"""`torchrun` on one node of a job. It leaves its node's number in the job's folder as soon as Python and torch are there, so
that hosts which do not come up can be named; binds ranks to the cores near their GPU; and gives them a folder on the node for
what Triton compiles, which is removed at the end."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

BINDING = os.environ.get("NUMA_BINDING", "")


def main() -> None:
    node = os.environ["SLURM_NODEID"]
    where = f"node {node}, {os.uname().nodename}"
    (Path(os.environ["PARALLEL_RL_JOB_DIR"]) / "up" / node).touch()
    # since torch 2.9
    binding = [f"--numa-binding={BINDING}"] if BINDING and torch.cuda.device_count() and find_spec("torch.numa") else []
    try:
        with tempfile.TemporaryDirectory(
            prefix=f"triton-{os.environ['SLURM_JOB_ID']}-", ignore_cleanup_errors=True
        ) as cache:
            os.environ.setdefault("TRITON_CACHE_DIR", cache)  # what it holds is run: nobody else may write there
            run.main([*binding, *sys.argv[1:]])
    except DistError as error:
        meeting = f"at MASTER_ADDR = {os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
        sys.exit(f"parallel-rl: error ({where}): the nodes did not meet {meeting}: {str(error).splitlines()[0]}")
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        how = f"ended with exit code {first.exitcode}" if first.exitcode > 0 else f"was killed by {first.signal_name()}"
        print(f"parallel-rl: error ({where}): rank {rank} {how}", file=sys.stderr, flush=True)
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)


main()
