"""What entering a phase costs."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from unittest import mock

from torch import Tensor

from parallel_rl.testing.pool import run_world
from tests.training.helpers import run, train_rows


def _kept(rank: int, arguments: list[str]) -> list[tuple[int, int]]:
    """As each optimizer is made: how many moments were there at the end of the step before, and how many are now."""
    from parallel_rl.training.models import learner

    build, update = learner.build_optimizer, learner.Learner.update
    moments: list[weakref.ref[Tensor]] = []
    found: list[tuple[int, int]] = []

    def counted(*given: object) -> object:
        found.append((len(moments), sum(one() is not None for one in moments)))
        return build(*given)  # type: ignore[arg-type]

    def noted(self: learner.Learner, *given: object) -> object:
        result = update(self, *given)  # type: ignore[arg-type]
        inner = self.optimizer.optimizer.state.values()
        moments[:] = [weakref.ref(x) for state in inner for name, x in state.items() if name.startswith("exp_avg")]
        return result

    gc.disable()  # what waits for it is memory, too
    try:
        with (
            mock.patch.object(learner, "build_optimizer", counted),
            mock.patch.object(learner.Learner, "update", noted),
        ):
            train_rows(rank, arguments)
    finally:
        gc.enable()
    return found


def test_the_moments_of_one_phase_are_gone_before_the_next_begins(tmp_path: Path) -> None:
    """A card that holds one optimizer beside the model, its gradients and a reference need not hold two."""
    arguments = run(
        "grpo_arithmetic.yaml",
        run__dir=tmp_path,
        parallel="{}",
        model__hidden=16,
        evaluation="null",
        data__held_out="null",
        warmup__steps=1,
        rl__steps=1,
        rl__prompts=4,
        rl__group_size=2,
    )
    [[before, after]] = run_world(1, _kept, arguments)
    assert before == (0, 0) and after[0] > 0 and after[1] == 0
