"""`python -m tools.gpu_check [STAGE ...]`: start the stages one after the other, and report."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.gpu_check.facts import Facts, read_facts
from tools.gpu_check.report import Outcome, page, summary, write_json

#: stage → seconds that it may take; together, each with its grace, they stay below ten minutes
LIMITS: Mapping[str, float] = {"smoke": 65, "nccl": 45, "kernels": 115, "head": 90, "host": 35, "trainer": 160}
GRACE = 10.0  # seconds in which a stage that was stopped may end its own processes
ENDS = (signal.SIGTERM, signal.SIGINT)


def start(stage: str, limit: float, cpu: bool, folder: Path) -> Outcome:
    """Run a stage in its own process; at its limit stop it and its children."""
    told = folder / f"{stage}.jsonl"
    command = [sys.executable, "-m", "tools.gpu_check", "--inside", str(told), stage, *(["--cpu"] if cpu else [])]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if cpu else {}
    began = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # until there is a process that `_stop` can end
    with subprocess.Popen(  # nosec B603 # no shell
        command, start_new_session=True, env={**os.environ, **hidden}, preexec_fn=_let_signals_in
    ) as process:
        status: int | None = None
        try:
            _let_signals_in()
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            _stop(process)
    facts = tuple(read_facts(told))
    wrong = any(fact.kind == "wrong" for fact in facts)
    ended = "stopped" if status is None else "wrong" if wrong else "right" if status == 0 else f"failed ({status})"
    return Outcome(stage, ended, time.monotonic() - began, facts)


def inside(stage: str, told: Path | None, device: str) -> bool:
    """Run a stage in this process; return whether every check passed."""
    facts = Facts(stage, told)
    try:
        importlib.import_module(f"tools.gpu_check.{stage}").run(facts, device)
    except Exception as error:
        traceback.print_exc()
        facts.check("the stage itself", False, f"{type(error).__name__}: {error}")
    return facts.right


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 for a wrong result, not for a missed figure."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(LIMITS)}; default: all")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the host: tries the check itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every fact here")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a section for benchmarks/RESULTS.md here")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = [stage for stage in options.stages if stage not in LIMITS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no stage; choose of {', '.join(LIMITS)}")
    if options.inside is not None:
        return 0 if inside(options.stages[0], options.inside, "cpu" if options.cpu else "cuda") else 1
    card = "the CPU, tiny sizes" if options.cpu else _card()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in options.stages or LIMITS:
            outcomes.append(start(stage, LIMITS[stage], options.cpu, Path(folder)))
            if options.json is not None:
                write_json(options.json, outcomes, card)
            if options.page is not None:
                options.page.write_text(page(outcomes, card), encoding="utf-8")
    print("", *summary(outcomes), sep="\n")
    return 0 if all(one.ended == "right" for one in outcomes) else 1


def _let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a stage's remaining processes: first by SIGTERM, so that torchrun ends its ranks."""
    end, how = time.monotonic() + GRACE, signal.SIGTERM
    while how != signal.SIGKILL:
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            return
        time.sleep(0.05)
        process.poll()  # reap the process, else it still counts as there
        how = signal.SIGCONT if time.monotonic() < end else signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)


def _card() -> str:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU that torch sees; --cpu tries the check itself at tiny sizes")
    return torch.cuda.get_device_name()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not by the signal itself: a stage that runs is stopped, too
    sys.exit(main())
