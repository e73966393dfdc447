"""Losses inside megatron-core's schedule: what the kit says of them there, and of a schedule whose factors are not undone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

import parallel_rl.megatron.step as integration
from parallel_rl.cli import main
from parallel_rl.testing.alone import check_alone, trial_of
from parallel_rl.testing.cases import Case, Trial
from parallel_rl.testing.check import batch_for
from parallel_rl.testing.layouts import Layout
from parallel_rl.testing.observe import Observation, observe
from parallel_rl.testing.pool import run_world
from parallel_rl.testing.step import Outcome
from parallel_rl.verify import schedule

PACKED = Layout(1, 1, 1, "packed", 3, "zigzag")


def test_through_a_real_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks, two stages: a loss with statistics of the step is right there, and a fault has the name it has without."""
    losses = ["--loss", "kto", "--loss", "tests.testing.planted:ContextAveraged"]
    layouts = ["--layouts", "cp=2", "pp=2", "micro=3", "packing=packed+padding,tree"]
    assert main(["verify", *losses, "--through", "megatron", *layouts]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 losses obey the law" in said
    assert "gradient averaged over context ranks" in said and "tp1.cp2.dp1.pp2.packed+padding.mb3.zigzag" in said
    assert "kto (2 layouts)" in said


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_default_layouts(world: int) -> None:
    """Tensor × context × data × pipeline, both of Megatron's ways of scaling; on 8 ranks of one kind of loss."""
    layouts = schedule.schedule_layouts(world)
    for name in ("clipped_pg", "preference", "value")[: 1 if world == 8 else None]:
        trial = _trial(name)
        outcomes = schedule.SchedulePool(300).run(trial, layouts, torch.float64)
        for layout, of_ranks in zip(layouts, outcomes, strict=True):
            assert not observe(trial, layout, of_ranks, 1e-9).broken(1e-9), (name, layout.name)


def test_a_factor_of_megatron_that_is_not_undone_shows() -> None:
    """Otherwise a table that only stands beside the schedule would pass."""
    trial = _trial("nll")
    [right], [wrong] = ([run_world(1, ranks, trial)[0]] for ranks in (_as_it_is, _unscaled))
    assert not _seen(trial, right).broken(1e-9)
    seen = _seen(trial, wrong)
    assert seen.loss_factor == pytest.approx(1) and seen.gradient_factor == pytest.approx(1 / 3)


def _trial(name: str) -> Trial:
    case = Case(name)
    batch = batch_for(case, {8: schedule.schedule_layouts(8)})
    return trial_of(case, batch, check_alone(0, case, batch))


def _seen(trial: Trial, outcome: Outcome) -> Observation:
    return observe(trial, PACKED, [outcome], 1e-9)


def _as_it_is(rank: int, trial: Trial) -> Outcome:
    return schedule.run_layout(PACKED, trial, schedule.place(PACKED, 60.0), torch.float64)


def _unscaled(rank: int, trial: Trial) -> Outcome:
    of_package = integration.scaled_loss_func
    integration.scaled_loss_func = lambda share, *_, **__: lambda output: _reported(*share(output))
    try:
        return _as_it_is(rank, trial)
    finally:
        integration.scaled_loss_func = of_package


def _reported(loss: torch.Tensor, metrics: object) -> tuple[torch.Tensor, dict[str, object]]:
    return loss, {"loss": loss.detach().clone(), "metrics": metrics}
