"""One loss, any layout, the same numbers."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from parallel_rl import losses
from tests.distributed import law
from tests.distributed.pool import preload, run_world

preload("parallel_rl", "tests.distributed.law")

WORLDS = (1, 2, 4, 8)
LOW_PRECISION = [
    pytest.param(torch.bfloat16, id="bfloat16"),
    pytest.param(torch.float16, id="float16", marks=pytest.mark.slow),
]


@cache
def _outcomes(
    world: int, half_masked: bool, dtype: torch.dtype, shift: float
) -> dict[str, dict[str, list[law.Outcome]]]:
    """case → layout → an outcome a rank; one run of a world serves all of its cases."""
    per_rank = run_world(world, law.check_world, world, 5, half_masked, dtype, law.CASES, shift, timeout=300)
    found: dict[str, dict[str, list[law.Outcome]]] = {}
    for entries in zip(*per_rank, strict=True):
        case, layout, _ = entries[0]
        found.setdefault(case, {})[layout] = [outcome for _, _, outcome in entries]
    return found


def _assert_law(
    case: law.Case, world: int, half_masked: bool, dtype: torch.dtype, shift: float, tolerance: float
) -> None:
    batch = law.make_batch(5, half_masked, case.loss == "preference", dtype, shift)
    found = _outcomes(world, half_masked, dtype, shift)[case.name]
    assert len(found) == len(law.layouts(world))
    assert law.faults(case, law.expected(case, batch), found, tolerance) == []


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", law.CASES, ids=lambda case: case.name)
def test_float64(case: law.Case, world: int) -> None:
    _assert_law(case, world, False, torch.float64, 0.0, 1e-10)


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.slow)))
@pytest.mark.parametrize("case", law.CASES, ids=lambda case: case.name)
def test_a_masked_data_rank(case: law.Case, world: int) -> None:
    _assert_law(case, world, True, torch.float64, 0.0, 1e-10)


@pytest.mark.parametrize("world", (1, 4))
@pytest.mark.parametrize("case", law.CASES, ids=lambda case: case.name)
def test_float32(case: law.Case, world: int) -> None:
    _assert_law(case, world, False, torch.float32, 0.0, 1e-5)


@pytest.mark.parametrize("case", law.CASES, ids=lambda case: case.name)
def test_float32_with_logits_far_from_zero(case: law.Case) -> None:
    _assert_law(case, 2, False, torch.float32, 300.0, 1e-5)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("case", law.CASES, ids=lambda case: case.name)
def test_low_precision_logits(case: law.Case, dtype: torch.dtype) -> None:
    """Against the float64 oracle of the same rounded logits: at most twice the error of one process that holds them whole."""
    batch = law.make_batch(5, False, case.loss == "preference", dtype, 0.0)
    want = law.expected(case, batch)
    alone = law.dense_error(case, batch, want, dtype)
    for layout, outcomes in _outcomes(4, False, dtype, 0.0)[case.name].items():
        loss, gradient = law.errors(case, want, outcomes)
        assert loss <= 2 * alone[0] + 1e-6, f"{layout}: loss off by {loss:.1e}, dense {alone[0]:.1e}"
        assert gradient <= 2 * alone[1], f"{layout}: gradient off by {gradient:.1e}, dense {alone[1]:.1e}"


def test_every_registered_loss_is_checked() -> None:
    assert {name for name in losses() if not name.startswith("doc_")} == {case.loss for case in law.CASES}
