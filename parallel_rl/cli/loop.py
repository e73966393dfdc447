"""`python -m parallel_rl.cli.loop (--check | --gate SECONDS) LOOP.py [ARGUMENT ...]`: a user's own loop in a job."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel_rl.cli.runs import refuse
from parallel_rl.cluster import preemption
from parallel_rl.cluster.preemption import failed, leave


def read(path: str) -> str:
    """Return the text of a loop; ValueError without a file, or for text that is no Python."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        compile(text, path, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"--script {path} cannot be run: {error}") from None
    return text


def main(words: Sequence[str]) -> int:
    """Check a loop, or wait until all ranks are up and run it as `python LOOP.py ARGUMENT ...` would."""
    seconds, (path, *arguments) = (None, words[1:]) if words[0] == "--check" else (float(words[1]), words[2:])
    try:
        read(path)
    except ValueError as error:
        return refuse(error)
    if seconds is None:
        print(f"ok: {path}", flush=True)
        return 0
    preemption.listen()
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from parallel_rl.training.preflight.gate import check_in

            check_in(seconds)
            if os.environ["RANK"] == "0":
                print(f"gate: {os.environ['WORLD_SIZE']} ranks are up", flush=True)
        sys.argv = [path, *arguments]
        sys.path.insert(0, str(Path(path).absolute().parent))
        runpy.run_path(path, run_name="__main__")
    except Exception as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    if status := main(sys.argv[1:]):
        leave(status)
