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
TIERS = (law.CORE, law.MORE, law.RECIPES)
LOW_PRECISION = [
    pytest.param(torch.bfloat16, id="bfloat16"),
    pytest.param(torch.float16, id="float16", marks=pytest.mark.slow),
]


@cache
def _outcomes(
    world: int, half_masked: bool, dtype: torch.dtype, shift: float, tier: int
) -> dict[str, dict[str, list[law.Outcome]]]:
    """case → layout → an outcome a rank; one run of a world serves all of its cases."""
    per_rank = run_world(world, law.check_world, world, 5, half_masked, dtype, TIERS[tier], shift, timeout=600)
    found: dict[str, dict[str, list[law.Outcome]]] = {}
    for entries in zip(*per_rank, strict=True):
        case, layout, _ = entries[0]
        found.setdefault(case, {})[layout] = [outcome for _, _, outcome in entries]
    return found


def _of(
    case: law.Case, world: int, half_masked: bool, dtype: torch.dtype, shift: float
) -> dict[str, list[law.Outcome]]:
    return _outcomes(world, half_masked, dtype, shift, _tier(case))[case.name]


def _tier(case: law.Case) -> int:
    return next(number for number, cases in enumerate(TIERS) if case in cases)


def _assert_law(
    case: law.Case, world: int, half_masked: bool, dtype: torch.dtype, shift: float, tolerance: float
) -> None:
    batch = law.make_batch(5, half_masked, case.loss, dtype, shift)
    found = _of(case, world, half_masked, dtype, shift)
    assert len(found) == len(law.layouts(world))
    assert law.faults(case, law.expected(case, batch), found, tolerance) == []


def _runs(*worlds: int, fast: tuple[tuple[int, ...], ...]) -> pytest.MarkDecorator:
    """Every case of a tier at every world; `fast` names the worlds of each tier that are not slow. Recipes, the last one,
    are options of the losses that the other tiers hold: they run in float64 only, on 2 and 4 ranks."""
    return pytest.mark.parametrize(
        ("case", "world"),
        [
            pytest.param(
                case,
                world,
                id=f"{world}-{case.name}",
                marks=() if world in fast[tier] else pytest.mark.slow,
            )
            for world in worlds
            for tier, cases in enumerate(TIERS[: len(fast)])
            for case in cases
            if world in (2, 4) or cases is not law.RECIPES
        ],
    )


@_runs(*WORLDS, fast=((2, 4), (4,), (2,)))
def test_float64(case: law.Case, world: int) -> None:
    _assert_law(case, world, False, torch.float64, 0.0, 1e-10)


@_runs(2, 4, fast=((2,), ()))
def test_a_masked_data_rank(case: law.Case, world: int) -> None:
    _assert_law(case, world, True, torch.float64, 0.0, 1e-10)


@_runs(1, 4, fast=((1, 4), (1,)))
def test_float32(case: law.Case, world: int) -> None:
    _assert_law(case, world, False, torch.float32, 0.0, 1e-5)


@_runs(2, fast=((2,), ()))
def test_float32_with_logits_far_from_zero(case: law.Case, world: int) -> None:
    _assert_law(case, world, False, torch.float32, 300.0, 1e-5)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@_runs(4, fast=((4,), ()))
def test_low_precision_logits(case: law.Case, world: int, dtype: torch.dtype) -> None:
    """Against the float64 oracle of the same rounded logits: at most twice the error of one process that holds them whole."""
    batch = law.make_batch(5, False, case.loss, dtype, 0.0)
    want = law.expected(case, batch)
    alone = law.dense_error(case, batch, want, dtype)
    for layout, outcomes in _of(case, world, False, dtype, 0.0).items():
        loss, gradient = law.errors(case, want, outcomes)
        assert loss <= 2 * alone[0] + 1e-6, f"{layout}: loss off by {loss:.1e}, dense {alone[0]:.1e}"
        assert gradient <= 2 * alone[1], f"{layout}: gradient off by {gradient:.1e}, dense {alone[1]:.1e}"


def test_every_registered_loss_is_checked() -> None:
    assert {name for name in losses() if not name.startswith("doc_")} == {case.loss for case in law.CORE}
