"""slurm/cause.sh: which line of a failed job's logs its outcome names, and with which status the job ends.

Bash alone runs here, on logs as jobs have left them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUMMARY = "parallel-rl: error (node {0}, node{1}): rank {0} {2}"
IMPORT = "1: [default0]:parallel-rl: error (rank 1): --import mine failed: RuntimeError: raised there"
STUCK = (
    "0: [default0]:parallel-rl: error (rank 0): SIGTERM came 24 s ago, but the rank has been stuck for 60 s at x.py:7"
)
WAITS = "0: [default0]:parallel-rl: error (rank 0, rl step 4): waited in all_reduce at x.py:7; it failed: closed"
LAST = "0: [default0]:parallel-rl: error (rank 0, rl step 4): waited in all_reduce at x.py:7; it last moved 27.0 s ago"
MISSING = "0: [default0]:  rank 1 on node2 is MISSING: no answer; its last heartbeat was 28.1 s ago, in rl step 4"
GLOO = (
    "0: [default0]:parallel-rl: error (rank 0): RuntimeError: [/gloo/gloo/transport/tcp/pair.cc:534] Connection closed"
)
TORCHRUN_1 = "0: parallel-rl: error (node 0, node1): rank 0 ended with exit code 1"
MEET = "0: parallel-rl: error (node 0, node1): the nodes did not meet at MASTER_ADDR = node1, port 20007: timed out"


def _bash(code: str) -> list[str]:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source {ROOT}/slurm/cause.sh; hosts=(node1 node2); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("logs", "up", "cause", "status"),
    [
        pytest.param(
            {"node-0": [STUCK], "node-1": [IMPORT, f"1: {SUMMARY.format(1, 2, 'ended with exit code 2')}"]},
            "01",
            IMPORT,
            2,
            id="a rank fails while another starts",
        ),
        pytest.param(
            {"node-0": [f"0: {SUMMARY.format(0, 1, 'was killed by SIGTERM')}"], "node-1": [IMPORT]},
            "1",
            IMPORT,
            1,
            id="a node is ended before it is up",
        ),
        pytest.param(
            {"node-0": [WAITS, MISSING, TORCHRUN_1], "node-1": [f"1: {SUMMARY.format(1, 2, 'was killed by SIGKILL')}"]},
            "01",
            f"1: {SUMMARY.format(1, 2, 'was killed by SIGKILL')}",
            137,
            id="a rank is killed",
        ),
        pytest.param({"node-0": [LAST, MISSING, TORCHRUN_1]}, "01", MISSING, 1, id="a rank hangs"),
        pytest.param(
            {"node-0": [GLOO, TORCHRUN_1], "node-1": [f"1: {SUMMARY.format(1, 2, 'ended with exit code 7')}"]},
            "01",
            f"1: {SUMMARY.format(1, 2, 'ended with exit code 7')}",
            7,
            id="a loop of one's own loses a peer",
        ),
        pytest.param(
            {"node-0": [TORCHRUN_1], "node-1": ["1: [default0]:KeyError: 'x'", "1: slurmstepd: error"]},
            "01",
            "1: [default0]:KeyError: 'x'",
            1,
            id="a traceback",
        ),
        pytest.param(
            {"node-0": [MEET]}, "0", "parallel-rl: error: node2 (node 1) did not come up", 1, id="a host hangs"
        ),
        pytest.param(
            {"node-0": [WAITS], "server-0": ["0: CancelledError: x", "0: parallel-rl: error: the server u ended"]},
            "01",
            "0: parallel-rl: error: the server u ended",
            1,
            id="a server ends",
        ),
        pytest.param({"node-0": [STUCK]}, "01", STUCK, 1, id="nothing else is known"),
    ],
)
def test_the_outcome_names_the_culprit(
    logs: Mapping[str, list[str]], up: str, cause: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "up").mkdir()
    for node in up:
        (tmp_path / "up" / node).touch()
    for name, lines in logs.items():
        (tmp_path / f"{name}.log").write_text("\n".join(["0: starting", *lines]) + "\n")
    first, *_, ended = _bash(
        f'found=$(causes {tmp_path} .log); echo "$found"; status_of "${{found%%$\'\\n\'*}}" {tmp_path} .log 143'
    )
    assert (first, int(ended)) == (cause, status)


EXITED = "srun: error: node1: task 0: Exited with exit code 2"
OURS = "parallel-rl: error: `parallel-rl check` needs megatron-core: pip install 'parallel-rl[megatron]'"
OPTION = "srun: unrecognized option '--container-image=x.sqsh'"
EXECVE = "slurmstepd: error: execve(): /none/python: No such file or directory"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([EXITED, OURS], OURS),
        ([OURS, EXITED], OURS),
        (
            [OPTION, 'Try "srun --help" for more information'],
            f"{OPTION} (CONTAINER_IMAGE needs the pyxis plugin of Slurm)",
        ),
        ([EXECVE, "srun: error: node1: task 0: Exited with exit code 2"], EXECVE),
        (["Traceback:", "  File x", "ImportError: libcudart.so", EXITED], "ImportError: libcudart.so"),
        (["/usr/bin/python3: No module named parallel_rl", EXITED], "/usr/bin/python3: No module named parallel_rl"),
        (["a warning", "srun: error: node1: task 0: Out Of Memory"], "srun: error: node1: task 0: Out Of Memory"),
        ([EXITED], EXITED),
    ],
)
def test_the_outcome_of_a_check_has_its_cause(lines: list[str], cause: str, tmp_path: Path) -> None:
    log = tmp_path / "check.log"
    log.write_text("\n".join(lines) + "\n")
    assert _bash(f"cause_of_check {log}") == [cause]
    log.write_text("")
    assert _bash(f"cause_of_check {log}") == [f"it printed nothing; see {log}"]
