"""What hosts do behind a loss's back, undone, against what they do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel_rl.hosts.scaling import averaged, numerator_denominator, whole_over_context
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.testing.pool import preload, run_world

preload("parallel_rl.hosts.scaling", "tests.hosts.test_scaling")


def _of_rank(rank: int) -> tuple[float, float, float, dict[str, float]]:
    group, shares = dist.group.WORLD, (0.25, 0.75)
    weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    whole = whole_over_context(weight * shares[rank], group)
    whole.backward()
    hosted = averaged(torch.tensor(shares[rank]), ranks=2, micro_batches=3) / 3  # a host that accumulates means
    dist.all_reduce(hosted)
    metrics = Metrics({
        "loss": Metric("share", torch.tensor(shares[rank])),
        "kind": Metric("ratio", torch.tensor(1.0 + rank), torch.tensor(4.0)),
        "most": Metric("max", torch.tensor(1.0)),
    })  # fmt: skip
    sums = numerator_denominator(metrics, calls=2)
    for pair in sums.values():  # as Megatron-LM's train_step does
        dist.all_reduce(pair)
    return whole.item(), weight.grad.item(), hosted.item() / 2, {name: float(x[0] / x[1]) for name, x in sums.items()}


def test_hidden_factors() -> None:
    first, second = run_world(2, _of_rank, timeout=60)
    assert first[0] == second[0] == 1.0 and (first[1], second[1]) == (0.25, 0.75)
    assert first[2] == second[2] == 1.0
    assert first[3] == second[3] == {"loss": 1.0, "kind": 3 / 8}


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="ranks = 0 must be at least 1"):
        averaged(torch.tensor(1.0), 0)
    with pytest.raises(ValueError, match="calls = 0 must be at least 1"):
        numerator_denominator(Metrics({}), 0)
