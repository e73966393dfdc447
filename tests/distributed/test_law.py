"""One loss, any layout, the same numbers."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from parallel_rl import losses
from tests.distributed import law
from tests.distributed.pool import preload, run_world

preload("parallel_rl", "tests.distributed.law")

TIERS = (law.CORE, law.MORE, law.TRUNCATED, law.RECIPES)


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
    batch = case.batch(5, half_masked, dtype, shift)
    found = _of(case, world, half_masked, dtype, shift)
    assert len(found) == len(law.layouts(world))
    assert law.faults(case, law.expected(case, batch), found, tolerance) == []


def _runs(*worlds: tuple[int, ...], fast: tuple[tuple[int, ...], ...]) -> pytest.MarkDecorator:
    """The cases of each tier at its worlds; `fast` names those that are not slow. Recipes are options of the losses that the
    other tiers hold: they run in float64 only."""
    return pytest.mark.parametrize(
        ("case", "world"),
        [
            pytest.param(case, world, id=f"{world}-{case.name}", marks=() if world in quick else pytest.mark.slow)
            for cases, mine, quick in zip(TIERS, worlds, fast, strict=False)
            for world in mine
            for case in cases
        ],
    )


@_runs((1, 2, 4, 8), (1, 2, 8), (1, 2, 8), (2,), fast=((2, 4), (2,), (2,), (2,)))
def test_float64(case: law.Case, world: int) -> None:
    _assert_law(case, world, False, torch.float64, 0.0, 1e-10)


@_runs((2, 4), (2,), (2,), fast=((2,), (), ()))
def test_a_masked_data_rank(case: law.Case, world: int) -> None:
    _assert_law(case, world, True, torch.float64, 0.0, 1e-10)


@_runs((1, 4), (1,), (1,), fast=((1,), (1,), ()))
def test_float32(case: law.Case, world: int) -> None:
    _assert_law(case, world, False, torch.float32, 0.0, 1e-5)


@_runs((2,), (2,), fast=((2,), ()))
def test_float32_with_logits_far_from_zero(case: law.Case, world: int) -> None:
    _assert_law(case, world, False, torch.float32, 300.0, 1e-5)


@_runs((4,), fast=((),))
def test_bfloat16_logits(case: law.Case, world: int) -> None:
    _assert_no_worse_than_dense(case, world, torch.bfloat16)


@_runs((4,), fast=((),))
def test_float16_logits(case: law.Case, world: int) -> None:
    _assert_no_worse_than_dense(case, world, torch.float16)


def _assert_no_worse_than_dense(case: law.Case, world: int, dtype: torch.dtype) -> None:
    """Against the float64 oracle of the same rounded logits: at most twice the error of one process that holds them whole."""
    batch = case.batch(5, False, dtype, 0.0)
    want = law.expected(case, batch)
    alone = law.dense_error(case, batch, want, dtype)
    for layout, outcomes in _of(case, world, False, dtype, 0.0).items():
        loss, gradient = law.errors(case, want, outcomes)
        assert loss <= 2 * alone[0] + 1e-6, f"{layout}: loss off by {loss:.1e}, dense {alone[0]:.1e}"
        assert gradient <= 2 * alone[1], f"{layout}: gradient off by {gradient:.1e}, dense {alone[1]:.1e}"


def test_every_registered_loss_is_checked() -> None:
    assert {name for name in losses() if not name.startswith("doc_")} == {case.loss for case in law.CORE}
