"""What tests/distributed calls equal: each way to differ is said, and nothing else."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from parallel_rl.testing.cases import Expected, Trial
from parallel_rl.testing.check import errors, list_faults
from parallel_rl.testing.step import Outcome
from tests.distributed import law, law_references

TOLERANCE = 1e-3
METRICS = {"kl": 0.5, "tokens": 8.0}


@cache
def trial() -> Trial:
    """A loss of 2 with a gradient of norm 5."""
    case = law.CORE[0]
    return Trial(case, law_references.batch_of(case, 5), Expected(2.0, torch.tensor([3.0, 4.0]), METRICS))


def outcomes(**of_the_last: object) -> list[Outcome]:
    """Of TP 2 × DP 2: the data ranks' shares are 0.5 and 1.5; the gradients are off by 2e-3 in all, which is 4e-4 of them."""
    maps = torch.tensor([0, 25 / 4, 0]).view(3, 1, 1)
    places = [(tensor, 0, data) for tensor in (0, 1) for data in (0, 1)]
    found = [Outcome((0.5, 1.5)[place[2]], METRICS, 1e-6, "", place, maps) for place in places]
    return [*found[:-1], found[-1]._replace(**of_the_last)]


def test_what_is_equal_has_no_fault() -> None:
    loss, gradient = errors(trial(), outcomes())
    assert loss == 0 and gradient == pytest.approx(4e-4)
    assert list_faults(trial(), {"tp2.dp2": outcomes(metrics=dict(METRICS))}, TOLERANCE) == []


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"share": 1.5 + 1e-9}, "tp2.dp2: tensor ranks differ: 1.500000001 and 1.5"),  # to the bit
        ({"metrics": {**METRICS, "kl": 0.25}}, "tp2.dp2: tensor ranks differ: 1.5 and 1.5"),
        ({"squared_error": 1e-4}, "tp2.dp2: gradient off by 2.0e-03"),
        ({"squared_error": float("nan")}, "tp2.dp2: gradient off by nan"),
        ({"stray": "a gradient at a masked token"}, "a gradient at a masked token"),
    ],
)
def test_a_fault_of_one_rank_is_said(planted: dict[str, object], said: str) -> None:
    assert list_faults(trial(), {"tp2.dp2": outcomes(**planted)}, TOLERANCE) == [said]


@pytest.mark.parametrize(
    ("want", "said"),
    [
        ({"loss": 2.01}, "loss off by 5.0e-03"),
        ({"loss": float("nan")}, "loss off by nan"),
        (
            {"metrics": {"kl": 0.5, "toks": 8.0}},
            "metrics ['kl', 'tokens'] instead of ['kl', 'toks']; toks nan instead of 8.0",
        ),
        ({"metrics": {**METRICS, "kl": 0.501}}, "kl 0.5 instead of 0.501"),
        ({"metrics": {**METRICS, "kl": 0.5001}}, ""),
    ],
)
def test_a_fault_of_all_ranks_alike_is_said(want: dict[str, object], said: str) -> None:
    there = trial()._replace(want=trial().want._replace(**want))
    found = list_faults(there, {"tp2.dp2": outcomes()}, TOLERANCE)
    assert "; ".join(found).replace("tp2.dp2: ", "") == said
