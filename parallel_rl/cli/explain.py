"""The command `parallel-rl explain`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], version: str) -> None:
    """Add the command and its options; nothing of torch is imported for them."""
    parser = commands.add_parser(
        "explain",
        help="show one dumped step token by token, or two side by side, on a page",
        description="Makes a self-contained HTML page of a step that `parallel-rl train ... --dump-step N` or "
        "parallel_rl.explain.dump_step wrote. Exit status: 0, or 2 for bad input.",
        allow_abbrev=False,
    )
    parser.add_argument("step", metavar="STEP", help="folder of a dumped step, or of a run with one")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="a second one, shown beside it")
    parser.add_argument("--out", metavar="FILE", default="explain.html", help="the page (explain.html)")
    parser.add_argument("--samples", metavar="N", default="8", help="number of texts shown of each step (8), or 'all'")
    parser.set_defaults(version=version)  # for the page's footer


def write(known: argparse.Namespace) -> int:
    """Write the page; ValueError for bad input, OSError if the page cannot be written."""
    from parallel_rl.explain.page import check_extras, page
    from parallel_rl.explain.read import read_step

    check_extras()
    most, out = known.samples, Path(known.out)
    if most != "all" and not most.isdecimal():
        raise ValueError(f"--samples {most} is not valid; give a number, or 'all'")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.absolute().parent}")
    steps = [read_step(path) for path in (known.step, known.other) if path is not None]
    text = page(steps, most_samples=2**31 if most == "all" else int(most), version=known.version)
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    size = out.stat().st_size
    print(f"wrote {known.out} ({size / 1e6:.1f} MB): open it in a browser, or print it", flush=True)
    return 0
