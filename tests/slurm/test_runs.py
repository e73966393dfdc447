"""The real script and the real trainer on the private cluster: the numbers of one process, arrays, two jobs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import CONFIG, ROOT, SCRIPT, Rows, alone, arguments, checked, curve, submit, words

pytestmark = pytest.mark.slurm
STEPS = 3


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The curve of one process in float64."""
    folder = tmp_path_factory.mktemp("alone")
    alone(arguments(folder, STEPS, run__dtype="float64"))
    return curve(folder)


def assert_same(found: Rows, expected: Rows) -> None:
    """The engine's tolerance for layouts in float64."""
    assert [set(row) for row in found] == [set(row) for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row.pop("phase") == "rl"
        assert row == pytest.approx({name: wanted[name] for name in row}, rel=1e-8, abs=1e-12)


def test_nodes_give_the_curve_of_one_process(cluster: Cluster, expected: Rows, tmp_path: Path) -> None:
    """Data and context ranks on four nodes; tensor ranks on two are those of the pair below.

    Takes half a minute: a job of several nodes starts torchrun, its ranks and their imports on each.
    """
    given = arguments(tmp_path / "run", STEPS, "{context: 2}", run__dtype="float64")
    said = checked(cluster, submit(cluster, tmp_path / "logs", 4, given), tmp_path / "logs")
    assert len(list((tmp_path / "logs").rglob("stdout.log"))) == 4, said  # one a rank
    batch = (tmp_path / "logs" / "batch.out").read_text()
    assert "gate: 4 ranks are up" in batch and "rl step     reward" in batch, batch  # what rank 0 prints
    assert_same(curve(tmp_path / "run"), expected)


def test_an_array_and_another_job_side_by_side_do_not_meet(cluster: Cluster, expected: Rows, tmp_path: Path) -> None:
    """Three jobs on four nodes at the same time: each has the port of its own id, its own run and its own logs.

    Takes half a minute, as every job of several nodes: torchrun, its ranks and their imports start on each.
    """
    logs = tmp_path / "logs"
    sweep = arguments(tmp_path / "task-{task}", STEPS, run__dtype="float64")
    tasks = submit(cluster, logs, 1, sweep, "--array=0-1")
    number = submit(
        cluster,
        logs,
        2,
        arguments(tmp_path / "pair", STEPS, "{tensor: 2, sequence_parallel: true}", run__dtype="float64"),
    )
    cluster.until(lambda: cluster.count("RUNNING") == 3, 300, "three jobs at the same time")
    cluster.until(lambda: cluster.count("RUNNING") == 0, 400, "their end")
    checked(cluster, number, logs)
    cluster.until(lambda: cluster.count("COMPLETING", tasks) == 0, 200, "the end of what Slurm tidies up")
    assert cluster.count("COMPLETED", tasks) == 2, words(logs)
    for name in ("task-0", "task-1", "pair"):
        assert_same(curve(tmp_path / name), expected)


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch")))
def test_slurm_takes_every_script(cluster: Cluster, script: str) -> None:
    done = cluster.run("sbatch", "--test-only", "--nodes=4", "--cpus-per-task=16", f"slurm/{script}", CONFIG, cwd=ROOT)
    assert "to start at" in done.stderr


@pytest.mark.parametrize(
    "options, says",
    [
        (["--partition=gpu"], "invalid partition specified: gpu"),
        (["--gpus-per-node=9"], "Requested node configuration is not available"),
        (["--nodes=5"], "Batch job submission failed"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused_at_once(
    cluster: Cluster, options: list[str], says: str, tmp_path: Path
) -> None:
    sizes = ["--nodes=2", "--gpus-per-node=8", "--cpus-per-task=16", f"--output={tmp_path}/out"]
    done = cluster.run("sbatch", *sizes, *options, SCRIPT, CONFIG, check=False, cwd=ROOT)
    assert done.returncode and says in done.stderr
