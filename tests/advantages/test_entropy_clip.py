"""CLIP-B and CLIP-V against their definitions, and over ranks."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.advantages.entropy_clip import clip_by_batch, clip_by_vocabulary, entropy_signal
from tests.distributed.pool import run_world


def fields() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    logprobs = -torch.rand(6, 20, generator=generator, dtype=torch.float64) * 4
    entropy, expected = (torch.rand(6, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(6, 20, generator=generator) < 0.7
    return (*(torch.where(mask, x, torch.nan) for x in (advantages, logprobs, entropy, expected)), mask)


def by_loops(mu: float, mu_v: float, fraction: float) -> tuple[Tensor, Tensor]:
    advantages, logprobs, entropy, expected, mask = fields()
    batch, vocabulary = mask.clone(), mask.clone()
    places = mask.nonzero().tolist()
    s = {(i, t): math.exp(float(logprobs[i, t])) * float(entropy[i, t] + logprobs[i, t]) for i, t in places}
    mean, std = statistics.fmean(s.values()), statistics.pstdev(s.values())
    d = {place: float(expected[place]) - value for place, value in s.items()}
    far = []
    for place in s:
        if advantages[place] < 0 and s[place] - mean < -mu * std:
            batch[place] = False
        if advantages[place] < 0 and d[place] > mu_v * statistics.pstdev(d.values()):
            far.append(place)
    for place in sorted(far, key=d.__getitem__, reverse=True)[: max(int(len(s) * fraction), 1)]:
        vocabulary[place] = False
    return batch, vocabulary


@pytest.mark.parametrize(("mu", "mu_v", "fraction"), [(1.0, 1.0, 0.05), (0.5, 2.0, 1.0), (0.0, 0.0, 1e-4)])
def test_against_the_definition(mu: float, mu_v: float, fraction: float) -> None:
    advantages, logprobs, entropy, expected, mask = fields()
    signal = entropy_signal(logprobs, entropy, mask)
    batch, vocabulary = by_loops(mu, mu_v, fraction)
    assert torch.equal(clip_by_batch(advantages, signal, mask, mu), batch) and not torch.equal(batch, mask)
    found = clip_by_vocabulary(advantages, signal, expected, mask, mu_v, fraction)
    assert torch.equal(found, vocabulary) and not torch.equal(vocabulary, mask)


def on_a_rank(rank: int) -> tuple[Tensor, Tensor]:
    mine = slice(0, 1) if rank == 0 else slice(1, 6)
    advantages, logprobs, entropy, expected, mask = (x[mine] for x in fields())
    signal, world = entropy_signal(logprobs, entropy, mask), dist.group.WORLD
    batch = clip_by_batch(advantages, signal, mask, 1.0, world)
    return batch, clip_by_vocabulary(advantages, signal, expected, mask, 1.0, 0.05, world)


def test_two_ranks_choose_what_one_chooses() -> None:
    ranks = run_world(2, on_a_rank)
    for k, expected in enumerate(by_loops(1.0, 1.0, 0.05)):
        assert torch.equal(torch.cat([rank[k] for rank in ranks]), expected)


def test_positive_tokens_and_empty_masks() -> None:
    advantages, logprobs, entropy, expected, mask = fields()
    signal = entropy_signal(logprobs, entropy, mask)
    assert torch.equal(clip_by_batch(advantages.abs(), signal, mask, 0.0), mask)
    assert torch.equal(clip_by_vocabulary(advantages.abs(), signal, expected, mask, 0.0, 1.0), mask)
    none = torch.zeros_like(mask)
    assert not clip_by_batch(advantages, signal, none).any()
    assert not clip_by_vocabulary(advantages, signal, expected, none).any()


def test_bad_input() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="advantages, signal and mask must be of one shape"):
        clip_by_batch(x, x[:1], mask)
    with pytest.raises(ValueError, match=r"mu = -1\.0 must be at least 0"):
        clip_by_batch(x, x, mask, -1.0)
    with pytest.raises(ValueError, match=r"expected must be \[2, 3\] like the signal"):
        clip_by_vocabulary(x, x, x[0], mask)
    with pytest.raises(ValueError, match=r"max_fraction = 0 must lie in \(0, 1\]"):
        clip_by_vocabulary(x, x, x, mask, max_fraction=0)
