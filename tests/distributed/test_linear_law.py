"""One loss on hidden states and the LM head, any layout, the same numbers."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.distributed import law, linear_law
from tests.distributed.pool import preload, run_world

preload("parallel_rl", "tests.distributed.linear_law")

CASES = [case for case in law.CORE if linear_law.takes_head(case)]
CASES += [case for case in law.TRUNCATED if linear_law.reads_one_distribution(case)]
CASES += [
    law.Case("clipped_pg", {"reference_policy_kl_penalty": 0}, {"top_k": 13}),
    law.Case("clipped_pg", {"reference_policy_kl_penalty": 0}, {"kept_sets": True}),
    law.Case("policy", {"ratio_level": "sequence-mean"}, {"top_k": 15, "top_p": 0.95, "temperature": 1.2}),
]


@cache
def _outcomes(world: int) -> dict[str, dict[str, list]]:
    found: dict[str, dict[str, list]] = {}
    for entries in zip(*run_world(world, linear_law.check_world, world, CASES, timeout=300), strict=True):
        case, layout, *_ = entries[0]
        found.setdefault(case, {})[layout] = [entry[2:] for entry in entries]
    return found


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=() if world == 2 else pytest.mark.slow) for world in (1, 2, 8)]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64(case: law.Case, world: int) -> None:
    batch = case.batch(5, False, torch.float64, 0.0)
    found = _outcomes(world)[case.name]
    assert len(found) == len(linear_law.layouts(world))
    assert linear_law.faults(batch, law.expected(case, batch), found, 1e-10) == []


def test_every_loss_on_log_probs_takes_part() -> None:
    """And those on whole logits; the others have a scalar head."""
    assert {case.loss for case in CASES} >= {
        *("nll", "policy", "clipped_pg", "dpo", "kto", "mix", "simpo", "cpo", "orpo"),
        *("prm", "distillation", "full_distillation"),
    }
    assert {rule for case in CASES for rule in case.options} >= {"top_k", "top_p", "kept_sets"}
