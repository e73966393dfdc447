"""`.ci/run` on a Makefile of its own: stages in order, two side by side, nothing left behind. And what the real one hides."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# each of the two waits for the other: neither ends unless both run at once
_MEET = "touch {ours}; for i in $$(seq 200); do [ ! -e {theirs} ] || break; sleep 0.05; done; [ -e {theirs} ]"
_SLOW = _MEET.format(ours="slow", theirs="slurm")
_SLURM = _MEET.format(ours="slurm", theirs="slow")
_STAY = "echo $$$$ >left; touch slow; exec sleep 61"


def _start(folder: Path, stages: str, **says: str) -> subprocess.Popen[str]:
    """`.ci/run STAGES` where `make X` says X and does what `says` has for it."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    names = ["install", "install-chromium", "install-slurm", "lint", "test", "test-slow", "test-slurm"]
    rules = [
        f"{name}:\n\t@echo {name} 1 of 2; {says.get(name.replace('-', '_'), 'true')}\n\t@echo {name} 2 of 2\n"
        for name in names
    ]
    (folder / "Makefile").write_text(f".PHONY: {' '.join(names)}\n{''.join(rules)}")
    # as from a terminal: under `make`, or in the background of a shell, which ignores Ctrl-C, the tests run elsewhere
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    return subprocess.Popen(
        [".ci/run", *stages.split()], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def _is_gone(folder: Path) -> bool:
    return not Path("/proc", (folder / "left").read_text().strip()).exists()


def test_the_two_long_stages_run_side_by_side_after_the_others_and_speak_one_after_the_other(tmp_path: Path) -> None:
    run = _start(tmp_path, "test-slurm test-slow lint", test_slow=_SLOW, test_slurm=_SLURM)
    said, _ = run.communicate(timeout=60)
    lines = said.splitlines()
    spoken = [line.removesuffix(" 1 of 2") for line in lines if line.endswith(" 1 of 2")]
    assert spoken[:4] == ["install", "lint", "install-chromium", "install-slurm"], said
    assert sorted(spoken[4:]) == ["test-slow", "test-slurm"]
    assert all(lines[lines.index(f"{stage} 1 of 2") + 1] == f"{stage} 2 of 2" for stage in spoken)  # nothing is mixed
    assert run.returncode == 0 and [line.split(":")[0] for line in lines[-4:]] == ["install", "lint", *spoken[4:]]
    assert all(" s, status 0: " in line and line.endswith(" 2 of 2") for line in lines[-4:])


def test_one_stage_alone_installs_nothing_beforehand(tmp_path: Path) -> None:
    said, _ = _start(tmp_path, "test-slow").communicate(timeout=60)
    assert said.splitlines()[:4] == [f"{stage} {half} of 2" for stage in ("install", "test-slow") for half in (1, 2)]


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    run = _start(tmp_path, "lint tset")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 2 and said.startswith("tset is no stage; there are: install lint "), said


def test_a_failure_ends_the_run(tmp_path: Path) -> None:
    run = _start(tmp_path, "lint test", lint="exit 3")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 2 and "test 1 of 2" not in said  # make's status
    assert [line.split(" s, ")[-1] for line in said.splitlines()[-2:]] == [
        "status 0: install 2 of 2",
        "status 2: lint 1 of 2",
    ]


def test_a_failure_of_one_ends_the_other(tmp_path: Path) -> None:
    run = _start(tmp_path, "test-slow test-slurm", test_slow=_STAY, test_slurm=f"{_SLURM}; exit 3")
    said, _ = run.communicate(timeout=60)
    *_, last_but_one, last = said.splitlines()
    assert run.returncode == 2 and _is_gone(tmp_path)
    assert last_but_one.endswith("status 2: test-slurm 1 of 2") and last == "test-slow: stopped"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    run = _start(tmp_path, "test-slow test-slurm", test_slow=_STAY, test_slurm="touch slurm; exec sleep 60")
    limit = time.monotonic() + 60
    while not ((tmp_path / "slow").exists() and (tmp_path / "slurm").exists()):
        assert time.monotonic() < limit and run.poll() is None
        time.sleep(0.02)
    run.send_signal(number)
    said, _ = run.communicate(timeout=60)
    assert run.returncode in (-number, 128 + number), said
    assert _is_gone(tmp_path)
    assert sorted(said.splitlines()[-2:]) == ["test-slow: stopped", "test-slurm: stopped"]


@pytest.mark.parametrize(
    ("target", "processes"),
    [
        ("demo", 1),
        ("demo-hf", 2),
        ("test", 1),
        ("docs-site", 1),
        ("test-slow", 2),
        ("test-all", 1),
        ("test-triton", 1),
        ("test-slurm", 1),
        ("test-vllm", 1),
        ("soak", 1),
    ],
)
def test_what_is_made_for_the_cpu_sees_no_card(target: str, processes: int) -> None:
    """Beside one card four ranks are refused, and tests of the host run on the card; no other test reads our recipes."""
    made = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.installed", target]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    said = subprocess.run(made, cwd=ROOT, env=env, text=True, capture_output=True, check=True).stdout
    started = [
        line for line in said.splitlines() if any(word in line for word in ("torchrun", "pytest", "parallel-rl "))
    ]
    assert len(started) == processes and all("CUDA_VISIBLE_DEVICES= " in line for line in started), said
