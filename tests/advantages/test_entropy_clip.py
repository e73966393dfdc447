"""CLIP-B against its definition, and over ranks."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.advantages.tokenwise import clip_by_batch, entropy_signal
from parallel_rl.testing.pool import run_world


def fields() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    logprobs = -torch.rand(6, 20, generator=generator, dtype=torch.float64) * 4
    entropy = torch.rand(6, 20, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 20, generator=generator) < 0.7
    return (*(torch.where(mask, x, torch.nan) for x in (advantages, logprobs, entropy)), mask)


def by_loops(mu: float) -> Tensor:
    advantages, logprobs, entropy, mask = fields()
    kept = mask.clone()
    places = mask.nonzero().tolist()
    s = {(i, t): math.exp(float(logprobs[i, t])) * float(entropy[i, t] + logprobs[i, t]) for i, t in places}
    mean, std = statistics.fmean(s.values()), statistics.pstdev(s.values())
    for place in s:
        if advantages[place] < 0 and s[place] - mean < -mu * std:
            kept[place] = False
    return kept


@pytest.mark.parametrize("mu", [1.0, 0.5, 0.0])
def test_against_the_definition(mu: float) -> None:
    advantages, logprobs, entropy, mask = fields()
    signal = entropy_signal(logprobs, entropy, mask)
    kept = by_loops(mu)
    assert torch.equal(clip_by_batch(advantages, signal, mask, mu), kept) and not torch.equal(kept, mask)


def on_a_rank(rank: int) -> Tensor:
    mine = slice(0, 1) if rank == 0 else slice(1, 6)
    advantages, logprobs, entropy, mask = (x[mine] for x in fields())
    return clip_by_batch(advantages, entropy_signal(logprobs, entropy, mask), mask, 1.0, dist.group.WORLD)


@pytest.mark.slow
def test_two_ranks_choose_what_one_chooses() -> None:
    assert torch.equal(torch.cat(run_world(2, on_a_rank)), by_loops(1.0))


def test_positive_tokens_and_empty_masks() -> None:
    advantages, logprobs, entropy, mask = fields()
    signal = entropy_signal(logprobs, entropy, mask)
    assert torch.equal(clip_by_batch(advantages.abs(), signal, mask, 0.0), mask)
    assert not clip_by_batch(advantages, signal, torch.zeros_like(mask)).any()


def test_bad_input() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="advantages, signal and mask must be of one shape"):
        clip_by_batch(x, x[:1], mask)
    with pytest.raises(ValueError, match=r"mu = -1\.0 must be at least 0"):
        clip_by_batch(x, x, mask, -1.0)
