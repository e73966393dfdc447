"""One loss on hidden states and the LM head, any layout, the same numbers."""

from __future__ import annotations

from functools import cache

import pytest

from parallel_rl.testing import hidden_states
from parallel_rl.testing.cases import Case, Trial
from parallel_rl.testing.pool import preload, run_world
from tests.distributed import law, law_references

preload("parallel_rl.testing.hidden_states", "tests.distributed.law")

_BY_SEQUENCE = {"level": "sequence-mean", "mode": "tis", "high": 1.1}
_OF_STEP = {"statistic": "k2", "high": 0.03, "level": "step"}
_TRUNCATED = [case for case in law.TRUNCATED if hidden_states.reads_one_distribution(case)]
# every loss, and each way to truncate
FAST = [*(case for case in law.CORE if hidden_states.takes_head(case)), *_TRUNCATED[:3]]
CASES = [
    *FAST,
    *_TRUNCATED[3:],
    Case("clipped_pg", {"reference_policy_kl_penalty": 0}, {"top_k": 13}),
    Case("clipped_pg", {"reference_policy_kl_penalty": 0}, {"kept_sets": True}),
    Case("policy", {"ratio_level": "sequence-mean"}, {"top_k": 15, "top_p": 0.95, "temperature": 1.2}),
    Case("policy", {"aggregation": "seq-mean-token-mean", "importance": _BY_SEQUENCE}, {"top_p": 0.9}),
    Case(
        "policy",
        {
            "surrogate": {"name": "dppo", "divergence": "binary_kl", "low": 3e-3, "high": 2e-3, "detached": True},
            "entropy_bonus": {"name": "schedule", "peak": 0.1, "valley": 0.0, "decay_steps": 3},
            "rejection": {"rules": [_OF_STEP, {"statistic": "tv", "high": 0.1, "signed": True}], "denominator": "kept"},
        },
    ),
    Case("policy", {"on_policy": True, "rejection": {"rules": [{**_OF_STEP, "signed": True}]}}, {"top_p": 0.9}),
    Case("full_distillation", {"divergence": "reverse_kl", "squared_temperature": True}, {"temperature": 1.3}),
    Case("distillation", {"bucket_tail": True, "aggregation": "seq-mean-token-sum"}),
    Case("distillation", {"kl_type": "forward"}, {"temperature": 0.7}),
    Case("full_distillation", {"squared_temperature": True}, {"temperature": "per-sample"}),
    Case("distillation", {"bucket_tail": True, "overlap": True}, {"temperature": 1.1}),
]


@cache
def _truths() -> dict[str, Trial]:
    batches = {case.name: law_references.batch_of(case) for case in CASES}
    return {
        case.name: Trial(case, batches[case.name], law_references.expected(case, batches[case.name])) for case in CASES
    }


#: of the layouts of a world, and the cases on them: every loss on one of the first three layouts of four ranks
PARTS = {
    "first": (slice(0, 1), FAST[::2]),
    "second": (slice(1, 2), CASES[::2]),
    "third": (slice(2, 3), CASES[1::2]),
    "all": (slice(None), CASES),
}


@cache
def _outcomes(world: int, part: str) -> dict[str, dict[str, list]]:
    chosen, cases = PARTS[part]
    of_world = hidden_states.layouts(world)[chosen]
    given = [_truths()[case.name] for case in cases]
    found: dict[str, dict[str, list]] = {}
    for entries in zip(*run_world(world, hidden_states.check_world, of_world, given, timeout=300), strict=True):
        case, layout, *_ = entries[0]
        found.setdefault(case, {})[layout] = [entry[2:] for entry in entries]
    return found


RUNS = [
    pytest.param(case, world, part, id=f"{case.name}-{world}-{part}", marks=marks)
    for world, part, marks in (
        (4, "first", ()),
        (4, "second", pytest.mark.slow),
        (4, "third", pytest.mark.slow),
        (1, "all", pytest.mark.slow),  # every mode of the head meets every case
    )
    for case in PARTS[part][1]
]


@pytest.mark.parametrize(("case", "world", "part"), RUNS)
def test_float64(case: Case, world: int, part: str) -> None:
    """The first case of a run launches the world that serves them all."""
    found = _outcomes(world, part)[case.name]
    assert len(found) == len(hidden_states.layouts(world)[PARTS[part][0]])
    _, batch, want, _ = _truths()[case.name]
    assert hidden_states.faults(batch, want, found, 1e-10) == []


def test_every_loss_on_log_probs_takes_part() -> None:
    """And those on whole logits; the others have a scalar head."""
    assert {case.loss for case in CASES} >= {
        *("nll", "policy", "clipped_pg", "dpo", "kto", "mix", "simpo", "cpo", "orpo"),
        *("prm", "distillation", "full_distillation"),
    }
    assert {rule for case in CASES for rule in case.options} >= {"top_k", "top_p", "kept_sets"}
