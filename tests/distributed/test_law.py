"""One loss, any layout, the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple

import pytest
import torch

from parallel_rl.losses.registry import losses
from parallel_rl.testing import layouts
from parallel_rl.testing.cases import Case, Trial, dense_error, has_scalar_head
from parallel_rl.testing.check import errors, list_faults
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.testing.step import Outcome, check_world
from tests.distributed import law, law_references

preload("parallel_rl", "tests.distributed.law")

TIERS = {
    "core": law.CORE, "half of core": law.CORE[::2], "more": law.MORE, "truncated": law.TRUNCATED,
    "ways to truncate": law.TRUNCATED[:4], "recipes": law.RECIPES,
}  # fmt: skip


# of the 36 layouts of four ranks: each pair of two settings (sizes, packing, micro-batches, cut of the context) in one of them;
# every third of them together has each setting
PAIRS = (
    "tp2.cp2.dp1.packed+padding.mb3.zigzag", "tp2.cp2.dp1.packed.mb1.zigzag", "tp2.cp2.dp1.padded.mb1.contiguous",
    "tp1.cp2.dp2.packed.mb3.contiguous", "tp1.cp2.dp2.packed+padding.mb1.contiguous", "tp1.cp2.dp2.padded.mb3.zigzag",
    "tp2.cp1.dp2.packed.mb1.zigzag", "tp2.cp1.dp2.padded.mb3.zigzag", "tp2.cp1.dp2.packed+padding.mb3.zigzag",
    "tp4.cp1.dp1.padded.mb1.zigzag", "tp4.cp1.dp1.packed+padding.mb1.zigzag", "tp4.cp1.dp1.packed.mb3.zigzag",
)  # fmt: skip


class Run(NamedTuple):
    """The cases of a tier on layouts of a world: `PAIRS`, or the first `number` (None: all), without the first `skipped`.

    Case i runs on each `step`-th of these layouts, from layout i modulo `step`.
    """

    tier: str
    world: int
    number: int | str | None = None
    skipped: int = 0
    step: int = 1

    @property
    def layouts(self) -> list[layouts.Layout]:
        if isinstance(self.number, str):
            of_name = {layout.name: layout for layout in layouts.layouts(self.world)}
            chosen = [of_name[name] for name in PAIRS]
        else:
            chosen = layouts.layouts(self.world, self.number)
        return chosen[self.skipped :]

    def layouts_of(self, case: Case) -> list[layouts.Layout]:
        return self.layouts[TIERS[self.tier].index(case) % self.step :: self.step]


@dataclass(frozen=True)
class Setting:
    """The batch of a run."""

    half_masked: bool = False
    dtype: torch.dtype = torch.float64
    shift: float = 0.0


@cache
def _truths(tier: str, setting: Setting) -> dict[str, Trial]:
    found, batches = {}, {}
    for case in TIERS[tier]:
        kind = has_scalar_head(case.loss), case.truncated
        if kind not in batches:
            batches[kind] = law_references.batch_of(case, 5, setting.half_masked, setting.dtype, setting.shift)
        found[case.name] = Trial(case, batches[kind], law_references.expected(case, batches[kind], setting.dtype))
    return found


@cache
def _outcomes(run: Run, setting: Setting) -> dict[str, dict[str, list[Outcome]]]:
    """case → layout → an outcome a rank; one run of a world serves all cases of the same layouts."""
    trials = list(_truths(run.tier, setting).values())
    found: dict[str, dict[str, list[Outcome]]] = {}
    for first in range(run.step):
        given = run.layouts[first :: run.step], trials[first :: run.step], setting.dtype
        for entries in zip(*run_world(run.world, check_world, *given, timeout=600), strict=True):
            case, layout, _ = entries[0]
            found.setdefault(case, {})[layout] = [outcome for _, _, outcome in entries]
    return found


def _assert_law(case: Case, run: Run, setting: Setting, tolerance: float) -> None:
    found = _outcomes(run, setting)[case.name]
    assert [*found] == [layout.name for layout in run.layouts_of(case)]
    assert list_faults(_truths(run.tier, setting)[case.name], found, tolerance) == []


def _runs(*fast: Run, slow: tuple[Run, ...] = ()) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("case", "run"),
        [
            pytest.param(case, run, id=f"{run.world}-{run.number or 'all'}-{case.name}", marks=marks)
            for runs, marks in ((fast, ()), (slow, pytest.mark.slow))
            for run in runs
            for case in TIERS[run.tier]
        ],
    )


@_runs(
    Run("core", 4, 1), Run("ways to truncate", 4, 1), Run("recipes", 1, 6, skipped=5),
    slow=(
        Run("core", 4, "pairs", skipped=1, step=3), Run("half of core", 8, 1), Run("more", 4, 3, step=3),
        Run("truncated", 4, 4, step=2), Run("recipes", 4, 2, step=2),
    ),
)  # fmt: skip
def test_float64(case: Case, run: Run) -> None:
    """The first case of a run launches the worlds that serve them all, up to ten seconds.

    A loss meets each setting of a layout, and each pair of settings meets a third of the losses; further options meet one
    layout here and another one in the next test. One process is held by `test_float32`.
    """
    _assert_law(case, run, Setting(), 1e-10)


@_runs(
    Run("core", 4, 3, skipped=1, step=2),
    slow=(Run("more", 4, 2, skipped=1), Run("truncated", 4, 3, skipped=1, step=2)),
)
def test_a_masked_data_rank(case: Case, run: Run) -> None:
    """Half of the rows: all those of the second data rank, which the first layout lacks."""
    _assert_law(case, run, Setting(half_masked=True), 1e-10)


@_runs(Run("core", 1, step=3), slow=(Run("truncated", 1, step=3),))
def test_float32(case: Case, run: Run) -> None:
    """One process; on several ranks float32 meets the harder logits of the next test."""
    _assert_law(case, run, Setting(dtype=torch.float32), 1e-5)


@_runs(slow=(Run("core", 4, 2, step=2),))
def test_float32_with_logits_far_from_zero(case: Case, run: Run) -> None:
    _assert_law(case, run, Setting(dtype=torch.float32, shift=300.0), 1e-5)


@_runs(slow=(Run("core", 4, 2, step=2),))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_logits(case: Case, run: Run, dtype: torch.dtype) -> None:
    """Against the float64 oracle of the same rounded logits: at most twice the error of one process that holds them whole."""
    setting = Setting(dtype=dtype)
    trial = _truths(run.tier, setting)[case.name]
    alone = dense_error(trial, dtype, law_references.reference_of(case, dtype))
    for layout, outcomes in _outcomes(run, setting)[case.name].items():
        loss, gradient = errors(trial, outcomes)
        assert loss <= 2 * alone[0] + 1e-6, f"{layout}: loss off by {loss:.1e}, dense {alone[0]:.1e}"
        assert gradient <= 2 * alone[1], f"{layout}: gradient off by {gradient:.1e}, dense {alone[1]:.1e}"


def _settings(layout: layouts.Layout) -> set[object]:
    sizes = (layout.tp, layout.cp, layout.dp), layout.packing, layout.micro_batches
    return {*sizes, layout.cp_layout} if layout.cp > 1 else set(sizes)


def test_each_pair_of_settings_is_in_a_layout() -> None:
    """Or a loss that fails where two of them meet would pass the slow tests."""
    every, chosen = (
        {pair for layout in found for pair in map(frozenset, combinations(_settings(layout), 2))}
        for found in (layouts.layouts(4), Run("core", 4, "pairs").layouts)
    )
    assert chosen == every and len(PAIRS) == 12
    each = set().union(*map(_settings, layouts.layouts(4)))
    assert all(set().union(*map(_settings, Run("core", 4, "pairs").layouts[first::3])) == each for first in range(3))


def test_every_registered_loss_is_checked() -> None:
    assert {name for name in losses() if not name.startswith("doc_")} == {case.loss for case in law.CORE}
