"""The statistics of rows that begin anywhere, and of rows of a few tiles, built without a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vocab.test_triton_build import ARCHITECTURES, _cache, build_pass, machine_code, usage, wide_loop

from parallel_rl.vocab.backends.choice import CUTS, tiling  # isort: skip  # after the skip of the import above

__all__ = ["_cache"]
THREADS = 32 * CUTS["stats", (9, 0)].warps
#: instructions for a logit by entropy and dtype: of the loop where each logit is a load of its own, and of a whole program
MOST_NARROW = {True: (11, 11.5), False: (9.5, 9.5)}
MOST_IN_ALL = {True: (13.6, 13.5), False: (11.1, 10.75)}


def programs_at_once(registers: int) -> int:
    return 65536 // (-(-registers // 8) * 8 * THREADS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "entropy", "architecture", "dtype"),
    [
        ({"width": 128256, "within": True}, True, 90, torch.bfloat16),
        ({"width": 128257}, True, 90, torch.float32),
        ({"width": 128257}, False, 90, torch.bfloat16),
        ({"width": 128256, "within": True}, False, 90, torch.float32),
        ({"width": 128256, "within": True}, True, 100, torch.float32),
    ],
    ids=["of an odd first column", "at an odd stride", "at an odd stride, no entropy", "no entropy", "Blackwell"],
)
def test_a_lane_is_one_threads_wherever_rows_begin(
    architecture: int, rows: dict[str, Any], entropy: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The compiler spreads a lane over threads if its columns lie side by side: 39 instructions a logit, 288 of them SHFL."""
    kernel = build_pass("stats", dtype, architecture, entropy, **rows)
    registers, spilled = usage(kernel, tmp_path)
    assert spilled == 0 and programs_at_once(registers) >= 8
    if architecture == 90:
        loop = wide_loop(machine_code(kernel, tmp_path), "LDG.E")
        logits = 64 // dtype.itemsize
        assert sum("LDG.E" in what for what in loop) == logits, "a load for a logit: a warp's lie side by side"
        assert len(loop) <= MOST_NARROW[entropy][dtype.itemsize // 4] * logits
        assert not any("SHFL" in what or "BAR." in what for what in loop)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_kept_in_one_warp_wherever_rows_begin(architecture: int, tmp_path: Path) -> None:
    kernel = build_pass("stats", torch.float32, architecture, True, 128257, half=True)
    registers, spilled = usage(kernel, tmp_path)
    assert spilled == 0 and programs_at_once(registers) >= 7
    loop = wide_loop(machine_code(kernel, tmp_path), "LDG.E") if architecture == 90 else []
    assert len(loop) <= 21 * sum("LDG.E" in what for what in loop)
    assert not any("BAR." in what or "LDS" in what or "STS" in what for what in loop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "entropy", "dtype"),
    [
        (16032, True, torch.float32),
        (16032, False, torch.bfloat16),
        (18992, True, torch.bfloat16),
        (18992, False, torch.float32),
    ],
    ids=str,
)
def test_instructions_of_a_whole_program(width: int, entropy: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a shard of TP 8 up to a quarter lies outside the loop, in the tile that is not whole; and lanes meet once a row."""
    code = machine_code(build_pass("stats", dtype, 90, entropy, width), tmp_path)
    loop = wide_loop(code)
    tile = tiling(8192, width, dtype.itemsize, 132, CUTS["stats", (9, 0)])
    once = sum(not what.startswith("NOP") for _, what in code) - len(loop)
    issued = width // (tile.lanes * tile.per_lane) * len(loop) + once
    assert issued <= MOST_IN_ALL[entropy][dtype.itemsize // 4] * width / THREADS
