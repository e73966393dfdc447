"""A metric says whose count divided it: it halves with that count twice as large, and with no other."""

from __future__ import annotations

import pytest
import torch

from parallel_rl import Metrics, count_valid
from parallel_rl.testing.cases import Case, step_statistics
from tests.distributed import law, law_references

CASES = [*law.CORE, *law.MORE]
OF_CALL = {"sequences": 0, "pairs": 0, "tokens": 1}
OTHERS = {
    "weighted tokens", "token weights", "kept tokens", "kept sequences", "kept prompts", "kept turns", "turns", "prompts",
    "trajectories", "positive tokens", "labelled sequences", "desirable sequences", "undesirable sequences", "steps", None,
}  # fmt: skip


def metrics_of(case: Case, *factors: tuple[int, int]) -> list[Metrics]:
    """Of one batch with its counts of sequences and tokens times each pair of factors."""
    batch = law_references.batch_of(case)
    loss_fn = case.build()
    seqs, toks = count_valid(batch.data)
    statistics = step_statistics([(loss_fn, (batch.logits, batch.data, seqs, toks))])
    return [
        loss_fn(batch.logits, batch.data, seqs * by_seqs, toks * by_toks, statistics=statistics)[1]
        for by_seqs, by_toks in factors
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_metric_halves_with_its_count(case: Case) -> None:
    plain, *doubled = metrics_of(case, (1, 1), (2, 1), (1, 2))
    whole_step = case.loss in ("components", "mix") or "normalize" in str(
        case.config
    )  # counts of their own; counts in a weight
    for name, per in plain.divided_by.items():
        part = plain.parts(name)
        assert per in OF_CALL or per in OTHERS, (name, per)
        assert part.kind != "count" or per is None, name
        if whole_step or part.kind not in ("share", "count") or (name == "loss" and per is None):
            continue
        for which, found in enumerate(doubled):
            factor = 0.5 if OF_CALL.get(per or "") == which else 1.0
            torch.testing.assert_close(found.parts(name).value, part.value * factor, msg=f"{name} is per {per}, not so")


def test_a_share_of_a_step_has_a_count() -> None:
    """Only sums, extrema and totals of several components have none."""
    for case in law.CORE:
        if case.loss in ("components", "mix", "test_class"):
            continue
        [metrics] = metrics_of(case, (1, 1))
        without = {
            name for name, per in metrics.divided_by.items() if per is None and metrics.parts(name).kind == "share"
        }
        assert without <= {"likely", "good", "wins"} | (
            {"loss"} if case.config.get("positive_example_nll_weight") else set()
        )
