"""One loss called on log-probs, any layout and form, the numbers of its ordinary call on logits."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from parallel_rl.losses.registry import losses
from parallel_rl.testing import layouts
from parallel_rl.testing.cases import Case, Trial
from parallel_rl.testing.check import list_faults, runs_on
from parallel_rl.testing.on_logprobs import OnLogProbs
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.testing.step import Outcome, check_world
from tests.distributed import law, law_references

preload("parallel_rl.testing.on_logprobs", "tests.distributed.law")


def _reads_log_probs(case: Case) -> bool:
    return case.build().requirements.reads == "log-probs"


TIERS = {
    name: [case for case in cases if _reads_log_probs(case)]
    for name, cases in {"core": law.CORE, "more": law.MORE[::2], "more of them": law.MORE[1::2]}.items()
}


@cache
def _trials(tier: str) -> list[Trial]:
    found = []
    for case in TIERS[tier]:
        batch = law_references.batch_of(case)
        found.append(Trial(OnLogProbs(case), batch, law_references.expected(case, batch)))
    return found


@cache
def _outcomes(tier: str, layout: layouts.Layout) -> dict[str, list[Outcome]]:
    given = [trial for trial in _trials(tier) if runs_on(trial.case, layout)]
    per_rank = run_world(layout.world, check_world, [layout], given, torch.float64, timeout=300)
    return {entries[0][0]: [outcome for *_, outcome in entries] for entries in zip(*per_rank, strict=True)}


# one layout for each form of log-probs: cut into lists, whole rows, whole flat ones, cut flat ones
FAST = (
    "tp2.cp2.dp1.packed+padding.mb3.zigzag", "tp1.cp1.dp1.padded.mb1.zigzag", "tp1.cp1.dp1.packed+padding.mb1.zigzag",
)  # fmt: skip
FLAT = "tp2.cp2.dp1.packed.mb1.contiguous"


def _runs(tier: str, *names: str) -> list:
    return [
        pytest.param(
            tier,
            layout,
            id=f"{tier}-{layout.name}",
            marks=() if tier == "core" and layout.name in FAST else pytest.mark.slow,
        )
        for layout in (*layouts.layouts(1), *layouts.layouts(4))
        if layout.name in names
    ]


@pytest.mark.parametrize(
    ("tier", "layout"),
    [
        *_runs("core", *FAST, FLAT, "tp1.cp2.dp2.packed.mb3.contiguous"),
        *_runs("more", FAST[0]),
        *_runs("more of them", FAST[1]),
    ],
)
def test_log_probs_give_the_numbers_of_logits(tier: str, layout: layouts.Layout) -> None:
    """Loss, gradient through the log-probs and metrics are those of the dense references; masked log-probs are NaN.

    How log-probs come is a matter of the layout: every form with each loss, further options cut into lists or as whole rows.
    """
    found, wrong = _outcomes(tier, layout), []
    for trial in _trials(tier):
        if runs_on(trial.case, layout):
            wrong += [
                f"{trial.case.name}: {fault}"
                for fault in list_faults(trial, {layout.name: found[trial.case.name]}, 1e-10)
            ]
    assert wrong == []


def test_every_loss_on_log_probs_takes_part() -> None:
    names = {name for name in losses() if not name.startswith("doc_")}
    others = {"preference", "value", "prm", "distillation", "full_distillation"}
    assert {case.loss for case in TIERS["core"]} == names - others
