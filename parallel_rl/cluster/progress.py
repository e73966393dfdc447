"""Progress of ranks: reported by the work, located in a thread's stack, and the report on a run that stands still."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal


@dataclass
class _Progress:
    moves: int = 0
    doing: str = "starting up"
    saving: bool = False
    phase: str | None = None
    step: int = 0


_progress = _Progress()


def tick(doing: str, *, saving: bool = False) -> None:
    """Report that `doing` begins now; `saving` marks a write that a stop leaves time for."""
    _progress.moves += 1
    _progress.doing, _progress.saving = doing, saving


def enter_step(phase: str, step: int) -> None:
    """Report that step `step` of a phase, counted from 1, begins now."""
    _progress.phase, _progress.step = phase, step
    tick("the step's data")


def reset() -> None:
    _progress.phase, _progress.step = None, 0
    tick("starting up")


def moves() -> int:
    """Count the reports so far."""
    return _progress.moves


def doing() -> str:
    return _progress.doing


def saving() -> bool:
    """Return whether the last reported work is a save, which a stop leaves time for."""
    return _progress.saving


def step_name() -> str:
    """Name the step, as in "rl step 7"; empty before the first."""
    return "" if _progress.phase is None else f"{_progress.phase} step {_progress.step}"


NAMED = 16  # ranks, of a thousand that may be missing
ENDED = "SIGTERM"  # of torchrun or Slurm, because another rank failed
Kind = Literal["waits", "busy", "failed"]


@dataclass(frozen=True)
class Post:
    """Position of a rank.

    Attributes:
        kind: it waits in a collective, is busy otherwise, or failed. what: collective and line, line, or cause.
        step: "rl step 7", empty before the first. doing: its last reported work, begun `age` seconds ago.
        reason: why the collective failed; ENDED for a rank that was ended from outside.
    """

    kind: Kind
    rank: int
    host: str
    what: str
    step: str
    doing: str
    age: float
    reason: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def at(self) -> str:
        return ", ".join(part for part in (self.step, self.doing) if part)


def post_of(text: str | bytes) -> Post:
    return Post(**json.loads(text))


def report(mine: Post, posts: Mapping[int, Post], heard: Mapping[int, tuple[Post, float]], world: int) -> str:
    """Write the report: this rank's post, the ranks' answers, and the last (post, age) of the others."""
    lines = [f"parallel-rl: error{name_of(mine.rank, mine.step)}: {_headline(mine)}"]
    failed = [post for post in posts.values() if post.kind == "failed"]
    failed.sort(key=lambda post: post.reason == ENDED)  # the first is read as the cause
    busy = [post for post in posts.values() if post.kind == "busy"]
    missing = [rank for rank in range(world) if rank not in posts]
    lines += [f"rank {post.rank} on {post.host} FAILED in {post.at}: {post.what}" for post in failed[:NAMED]]
    lines += [_missing(rank, heard.get(rank)) for rank in missing[:NAMED]]
    if len(missing) > NAMED:
        lines.append(f"... and {len(missing) - NAMED} more ranks are MISSING: {ranges(missing[NAMED:])}")
    if not missing and not failed:  # who is not waiting, the others wait for
        lines += [
            f"rank {post.rank} on {post.host} is MISSING from the collective: it is at {post.what}, in {post.at}, since "
            f"{post.age:.1f} s"
            for post in busy[:NAMED]
        ]
        if not busy:
            lines.append("no rank is missing: they wait in different collectives, or the network is down")
    else:
        lines += [f"rank {post.rank} on {post.host} is at {post.what}, in {post.at}" for post in busy[:NAMED]]
    collectives: dict[tuple[str, str], list[int]] = {}
    for post in posts.values():
        if post.kind == "waits":
            collectives.setdefault((post.what, post.at), []).append(post.rank)
    lines += [f"waiting in {what}, {at}: rank {ranges(ranks)}" for (what, at), ranks in collectives.items()]
    return "\n  ".join(lines) + "\n"


def name_of(rank: int, step: str) -> str:
    return f" (rank {rank}, {step})" if step else f" (rank {rank})"


def where(post: Post) -> str:
    """End a sentence about a rank with its position."""
    if post.kind != "waits":
        return f"is at {post.what}, in {post.doing}"
    since = f"it failed: {post.reason}" if post.reason else f"it last moved {post.age:.1f} s ago"
    return f"waited in {post.what}, in {post.doing}; {since}"


def _headline(mine: Post) -> str:
    if mine.kind == "waits":
        return where(mine)
    return f"others wait in a collective that this rank is not in; it {where(mine)}"


def _missing(rank: int, last: tuple[Post, float] | None) -> str:
    if last is None:
        return f"rank {rank} is MISSING: it never sent a heartbeat"
    post, ago = last
    return f"rank {rank} on {post.host} is MISSING: no answer; its last heartbeat was {ago:.1f} s ago, in {post.at}"


def ranges(values: Sequence[int]) -> str:
    """Format numbers as ranges: 0-3, 7."""
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and parts[-1][-1] == value - 1:
            parts[-1] = [parts[-1][0], value]
        else:
            parts.append([value])
    return ", ".join("-".join(map(str, part)) for part in parts)


_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
# these wait for handles internally
_HANDLES = ("/megatron/core/pipeline_parallel/p2p_communication.py", "/megatron/core/distributed/")
_TORCH = ("/torch/", "/megatron/")


@dataclass(frozen=True)
class Line:
    """A frame's place in the source."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} {self.function}"


@dataclass(frozen=True)
class Place:
    """Place of a thread: its collective, if any, and its line of this package or of torch's caller."""

    collective: str | None
    line: str

    def __str__(self) -> str:
        return self.line if self.collective is None else f"{self.collective} ({self.line})"


def main_thread() -> tuple[Place, tuple[tuple[int, int], ...]]:
    """Locate the main thread; also return a mark that changes with any movement of it."""
    ident = threading.main_thread().ident
    assert ident is not None
    frame: FrameType | None = sys._current_frames()[ident]
    lines, mark = [], []
    while frame is not None:
        lines.append(Line(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        mark.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return _place(lines), tuple(mark)


def of_traceback(trace: TracebackType | None) -> Place:
    """Locate the raise of an exception."""
    lines: list[Line] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.insert(0, Line(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return _place(lines)


def _place(lines: Sequence[Line]) -> Place:
    if not lines:
        return Place(None, "an unknown place")
    # the outermost: all_gather_object calls all_gather
    call = max((index for index, line in enumerate(lines) if line.file.endswith(_COLLECTIVES)), default=None)
    if call is None and any(part in lines[0].file for part in _HANDLES):
        call = 0
    outer = lines if call is None else lines[call + 1 :]
    caller = next((line for line in outer if not any(part in line.file for part in _TORCH)), lines[0])
    return Place(None if call is None else lines[call].function, str(caller))
