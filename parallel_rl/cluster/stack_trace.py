"""Find out what a thread waits for, from its Python frames."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
# these wait for handles by themselves
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
    """Locate the main thread, with a mark that stays the same as long as it does not move at all."""
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
    """Locate frames, the innermost first."""
    if not lines:
        return Place(None, "an unknown place")
    # the outermost: all_gather_object calls all_gather
    call = max((index for index, line in enumerate(lines) if line.file.endswith(_COLLECTIVES)), default=None)
    if call is None and any(part in lines[0].file for part in _HANDLES):
        call = 0
    outer = lines if call is None else lines[call + 1 :]
    own = next((line for line in outer if not any(part in line.file for part in _TORCH)), lines[0])
    return Place(None if call is None else lines[call].function, str(own))
