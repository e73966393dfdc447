"""`python -m parallel_rl.cli.loop`, which a job runs for a loop of one's own; its gate on two ranks is in tests/slurm."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_rl.cli import loop
from parallel_rl.cluster import preemption

LOOP = "import sys\nimport beside\nprint(__name__, sys.argv[1:], beside.WORD)\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A loop with a module beside it; what a process of its own would take with it is put back."""
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    monkeypatch.setattr(sys, "argv", ["loop"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in (("_listens", False), ("_seen", 0), ("_ended", 0.0)):
        monkeypatch.setattr(preemption, name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield path
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.modules.pop("beside", None)


def test_a_loop_runs_as_python_would_run_it(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loop.main(["--gate", "5", str(script), "--lr", "1"]) == 0
    assert capsys.readouterr().out == "__main__ ['--lr', '1'] found\n"


def test_an_error_of_a_loop_ends_it_with_its_cause(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\nraise KeyError('lr')\n")
    assert loop.main(["--gate", "5", str(script)]) == 1  # and not dead of the signal
    traceback, _, last = capsys.readouterr().err.rstrip().rpartition("\n")
    assert f'"{script}", line 3' in traceback and last == "parallel-rl: error: KeyError: 'lr'"


def test_a_look_runs_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loop.main(["--check", str(script), "--lr", "1"]) == 0
    assert capsys.readouterr().out == f"ok: {script}\n"


@pytest.mark.parametrize("how", [["--check"], ["--gate", "5"]])
@pytest.mark.parametrize(("text", "why"), [(None, "No such file"), ("def f(:\n", "invalid syntax")])
def test_what_cannot_run_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str], how: list[str], text: str | None, why: str
) -> None:
    script.unlink() if text is None else script.write_text(text)
    assert loop.main([*how, str(script)]) == 2
    said = capsys.readouterr().err
    assert f"--script {script} cannot be run" in said and why in said
