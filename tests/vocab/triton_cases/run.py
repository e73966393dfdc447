"""Cases of this folder under Triton's interpreter, which only a fresh process can turn on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent


def check_cases(name: str) -> None:
    """Run the tests of one file; half a minute or more, since the interpreter runs every element of a block in numpy."""
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", "-W", "ignore"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [*command, str(CASES / f"{name}.py")], env=environment, cwd=CASES.parents[2], capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    last = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ""
    assert ran.returncode == 0 and " passed" in last and "skipped" not in last, ran.stdout[-8000:] + ran.stderr[-2000:]
