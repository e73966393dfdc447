"""A private cluster to try things on: python -m tests.slurm [--nodes N] [COMMAND ...]

Runs COMMAND, or a shell, with the cluster's `sbatch`, `squeue` and `scancel`; the cluster ends with it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.slurm.cluster import Cluster, missing


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.slurm", description="A private Slurm cluster to try things on."
    )
    parser.add_argument("--nodes", type=int, default=2, help="default: 2, with 8 pretended GPUs and 16 cores each")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="default: a shell")
    given = parser.parse_args()
    why = missing()
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    with Cluster(nodes=given.nodes) as cluster:
        print(f"{', '.join(cluster.nodes)} are up; they end with this command", file=sys.stderr)
        # what the ranks need on nodes that are one machine without GPUs
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **cluster.env}
        return subprocess.run(given.command or [os.environ.get("SHELL", "bash")], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
