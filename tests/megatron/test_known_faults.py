"""Our own step is right, or refuses by name, where megatron-core's own losses and marks are known to be wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_rl.testing import StepLayout, check_step
from parallel_rl.testing.pool import preload
from parallel_rl.testing.whole_step.known_faults import FAULTS

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron", "parallel_rl.testing.whole_step.worlds", "parallel_rl.doctor.fault_steps")

from parallel_rl.doctor import fault_steps as steps  # noqa: E402  after the preload

ROOT = Path(__file__).parents[2]
CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any], list[StepLayout]]] = {
    "callbacks of three values": (steps.plain, steps.tiny_config, [StepLayout(cp=2, per_token=False)]),
    "loss of multi-token prediction": (
        steps.plain, steps.heads, [StepLayout(per_token=False), StepLayout(cp=2, per_token=False), StepLayout(dp=2)],
    ),
    "recomputed heads with distributed activations": (
        steps.plain, steps.heads_recomputed, [StepLayout(tp=2, recompute=True)],
    ),
    "padding mask of experts": (
        steps.plain, steps.experts, [StepLayout(tp=2, sp=True, packed=True), StepLayout(pp=2, packed=True)],
    ),
    "attention sinks": (steps.with_sinks, steps.sinks, [StepLayout(tp=2), StepLayout(tp=2, dp=2)]),
    "routers' own losses": (steps.plain, steps.experts, [StepLayout(tp=2, sp=True), StepLayout(cp=2)]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_our_step_is_right(name: str) -> None:
    """A script of Megatron's own is wrong on these layouts, with some version: see `parallel-rl doctor`."""
    model, config, layouts = CASES[name]
    report = check_step(model, config, layouts=layouts)
    assert report.ok and not any(row.error for row in report.rows), str(report)


def test_gathered_logits_are_refused() -> None:
    report = check_step(steps.unsharded, steps.tiny_config, layouts=[StepLayout(tp=2)])
    [row] = report.rows
    assert not report.ok and "parallel_output = False" in row.error


def test_the_balance_within_sequences_is_the_same_packed_and_padded() -> None:
    """Of the step, whatever micro-batch a sequence lies in; Megatron takes a packed row for one sequence."""
    from parallel_rl.testing.whole_step.ranks import PoolRanks
    from parallel_rl.testing.whole_step.subject import StepSubject
    from parallel_rl.testing.whole_step.worlds import Worlds

    worlds = Worlds(StepSubject(steps.plain, steps.experts_in_sequences), 2, torch.float64, PoolRanks(60.0))
    seen = worlds.compared(StepLayout(packed=True), StepLayout(micro=1))
    assert not seen.error and seen.gradient < 1e-6  # routers work in float32


def test_megatrons_cross_entropy_is_not_called() -> None:
    """It smooths labels by the local vocabulary, counts padding columns and overwrites its logits."""
    calls = re.compile(r"import .*vocab_parallel_cross_entropy|vocab_parallel_cross_entropy\(")
    found = {
        path.name
        for path in (ROOT / "parallel_rl").rglob("*.py")
        if path.parent.name != "doctor" and calls.search(path.read_text(encoding="utf-8"))
    }
    assert found == set()


def test_every_known_fault_has_its_test() -> None:
    elsewhere = {"gathered logits", "balance within packed sequences", "label smoothing"}
    assert {fault.name for fault in FAULTS} == CASES.keys() | elsewhere
