"""The kernels that find a threshold, built without a card: no spills, loads of 128 bits where the shard is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vocab.test_triton_build import TYPES, _cache, accesses, build, machine_code, usage, wide_loop

from parallel_rl.vocab.backends.triton import threshold as kernels  # isort: skip  # after the skip of the import above
from parallel_rl.vocab.backends.choice import CUTS, tiling  # isort: skip

__all__ = ["_cache"]
POINTERS = {
    "end": "*fp32", "rate": "*fp32", "inv_t": "*fp64", "low": "*fp32", "high": "*fp32", "top": "*fp64", "unit": "*fp64",
    "copied": "*i32", "missed": "*i1", "before": "*i64", "pivots": "*fp32", "floor": "*fp32",
}  # fmt: skip
BINS, WEIGH, WEIGH_TOP_K, HELD, HELD_COUNTS = [
    ("bins", {"BINS": 128}), ("weigh", {"TOP_K": False}), ("weigh", {"TOP_K": True}),
    ("held", {"MASSES": True}), ("held", {"MASSES": False}),
]  # fmt: skip
#: (width, dtype, architecture): the passes that are built for it; each of them on Hopper, on Blackwell and at an odd width
BUILDS: dict[tuple[int, torch.dtype, int], list[tuple[str, dict[str, Any]]]] = {
    (16032, torch.bfloat16, 90): [BINS, WEIGH, HELD],
    (16032, torch.float32, 90): [WEIGH_TOP_K, HELD_COUNTS],
    (16032, torch.bfloat16, 100): [BINS, WEIGH_TOP_K, HELD],
    (16033, torch.float32, 90): [BINS, WEIGH, HELD],
}
#: instructions for a logit: adding another int64 sum to a pass is seen by no other test without a card
MOST = {"bins": 66, "weigh": 130, "held": 90}


@pytest.mark.parametrize(
    ("width", "dtype", "architecture", "name", "options"),
    [
        pytest.param(*at, *each, marks=() if at == (16032, torch.bfloat16, 90) else pytest.mark.slow)
        for at, passes in BUILDS.items()
        for each in passes
    ],
    ids=str,
)
def test_passes(
    width: int, dtype: torch.dtype, name: str, options: dict[str, Any], architecture: int, tmp_path: Path
) -> None:
    tile = tiling(8192, width, dtype.itemsize, 132, CUTS[name, (9, 0)])
    constants: dict[str, Any] = {
        "column_stride": 1, "LANES": tile.lanes, "PER_LANE": tile.per_lane, "ALIGNED_ROWS": tile.aligns(width),
        "ALIGNED_ENDS": tile.aligns(width), **options,
    }  # fmt: skip
    if options.get("MASSES") is False:
        constants |= dict.fromkeys(("floor", "top", "inv_t", "unit"))
    number = f"*{TYPES[dtype]}"
    types = {**POINTERS, "logits": number, "values": number, "parts": "*fp32" if name == "bins" else "*i64"}
    whole = tile.aligns(width)  # else a row begins anywhere, and each logit is a load
    aligned = {*types, "columns_per_program"} | ({"row_stride", "width"} if whole else set())
    built = build(
        getattr(kernels, f"{name}_kernel"), architecture, tile.warps, aligned - set(constants), constants, types
    )
    assert usage(built, tmp_path)[1] == 0
    loads = accesses(built)[0]
    of_a_thread = tile.lanes // (32 * tile.warps)
    assert sum(load.endswith("v4.b32") for load in loads) >= 2 * of_a_thread * whole  # the loop's, the tail's
    if architecture == 90:
        loop = wide_loop(machine_code(built, tmp_path), "LDG.E.128" if whole else "LDG.E")
        assert len(loop) <= MOST[name] * of_a_thread * tile.per_lane
        assert sum("SHFL" in what for what in loop) <= (22 if name == "weigh" else 0)
