"""Cases of this folder under Triton's interpreter, which only a fresh process can turn on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent


def check_cases(*names: str) -> None:
    """Run the tests of these files in one process; a minute, since each block is a row of numpy calls."""
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", "-W", "ignore"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += [str(CASES / f"{name}.py") for name in names]
    ran = subprocess.run(command, env=environment, cwd=CASES.parents[2], capture_output=True, text=True, timeout=900)
    last = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ""
    assert ran.returncode == 0 and " passed" in last and "skipped" not in last, ran.stdout[-8000:] + ran.stderr[-2000:]
