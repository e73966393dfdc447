"""The keys of draws: the published hash of seed, sample and position."""

from __future__ import annotations

import math

import pytest
import torch

import parallel_rl.vocab.sampling as sampling
from parallel_rl.vocab.sampling import sample_keys

MASK = (1 << 64) - 1


def _splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_the_hash_is_splitmix64() -> None:
    # first outputs of the published generator with seed 1234567
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    gamma = 0x9E3779B97F4A7C15
    counters = torch.tensor([(1234567 + (i + 1) * gamma + (1 << 63)) % (1 << 64) - (1 << 63) for i in range(4)])
    assert [int(x) & MASK for x in sampling._mix(counters)] == published


def test_keys_are_the_hash_of_seed_sample_and_position() -> None:
    gamma = 0x9E3779B97F4A7C15
    ids, positions = [0, 1, 5, 2**62, -3], [0, 7, 7, 1, 2**40]
    for seed in (0, 1, -1, 2**63, 2**64 + 1):
        keys = sample_keys(seed, torch.tensor(ids), torch.tensor(positions))
        for key, i, p in zip(keys.tolist(), ids, positions, strict=True):
            want = _splitmix((seed + gamma) & MASK)
            want = _splitmix((want + i * gamma) & MASK)
            want = _splitmix((want + p * gamma) & MASK)
            assert key & MASK == want


def test_keys_of_a_grid_are_all_different_and_broadcast() -> None:
    grids = [sample_keys(seed, torch.arange(300)[:, None], torch.arange(300)[None, :]) for seed in range(3)]
    assert grids[0].shape == (300, 300)
    assert torch.unique(torch.stack(grids)).numel() == 3 * 300 * 300
    bits = (grids[0].flatten()[:, None] >> torch.arange(64)) & 1
    deviation = (bits.double().mean(0) - 0.5).abs().max().item()
    assert deviation < 5 * 0.5 / math.sqrt(bits.shape[0])


@pytest.mark.parametrize(
    ("ids", "positions", "words"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), "sample_ids must be integers"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3), "positions must be integers"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), r"\[3\] and \[2\]"),
    ],
)
def test_bad_keys(ids: torch.Tensor, positions: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample_keys(0, ids, positions)
