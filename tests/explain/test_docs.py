"""docs/explain.md does what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_rl.cli import main
from tests.launch import UNCOMPILED
from tests.training.helpers import CONFIGS, ROOT

PAGE = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S)
LINES = [shlex.split(line) for language, block in BLOCKS if not language for line in block.splitlines()]


@pytest.mark.slow
def test_a_step_of_ones_own_loop_is_dumped_and_laid_beside_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = [block for language, block in BLOCKS if language == "python"]
    exec(compile(code, "docs/explain.md", "exec"), {})
    program, *arguments = LINES[-1]
    assert program == "parallel-rl" and main(arguments) == 0
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "step 7 against step 7" in text and text.count('class="sample"') == 4


@pytest.mark.slow
def test_a_step_of_a_run_is_dumped_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(CONFIGS)
    (_, *train), (_, *explain), *_ = LINES
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **UNCOMPILED}
    subprocess.run(
        [sys.executable, "-m", "parallel_rl.cli", *train], env=env, check=True, capture_output=True, timeout=300
    )
    assert main(explain) == 0 and "seen, rl step 3" in (tmp_path / "step.html").read_text(encoding="utf-8")
