"""The largest columns of vocabulary shards: the same ids on every split, the smaller id first among equals."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl.testing.pool import run_world
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.topk import top_columns
from tests.collectives import recorded

T, V = 40, 23


def make(dtype: torch.dtype) -> Tensor:
    """Few different values, so that most rows have ties across the k-th place; −inf, and rows of one value."""
    z = torch.randint(-3, 4, (T, V), generator=torch.Generator().manual_seed(0)).to(dtype)
    z[1] = 0.5
    z[2, 3:] = -math.inf
    z[3] = -math.inf
    return z


def by_sorting(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Python's sort of (−value, id)."""
    ids = torch.tensor([sorted(range(len(row)), key=lambda v: (-row[v], v))[:k] for row in z.tolist()])
    return z.gather(1, ids), ids


@pytest.mark.parametrize("k", [1, 2, 7, V])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ties_go_to_the_smaller_id(k: int, dtype: torch.dtype) -> None:
    z = make(dtype)
    values, ids = top_columns(z, k, VocabShard.of(V))
    want = by_sorting(z, k)
    assert values.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(values, want[0].to(values.dtype)) and torch.equal(ids, want[1])


@settings(max_examples=60, deadline=None)
@given(row=st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 1.0, 2.5]), min_size=1, max_size=9), data=st.data())
def test_any_row(row: list[float], data: st.DataObject) -> None:
    z, k = torch.tensor([row]), data.draw(st.integers(1, len(row)))
    assert torch.equal(top_columns(z, k, VocabShard.of(len(row)))[1], by_sorting(z, k)[1])


def _on_shards(rank: int, world: int) -> list[tuple[Tensor, Tensor, int]]:
    found = []
    splits = {"chunk": [min(V, -(-V // world) * r) for r in range(world + 1)], "named": [0, *range(1, world), V]}
    for dtype in (torch.float32, torch.bfloat16):
        for bounds in splits.values():
            for k in (1, 6, V):
                z, (start, stop) = make(dtype), bounds[rank : rank + 2]
                local = torch.cat([z[:, start:stop], torch.full((T, 2), 1e4).to(dtype)], 1)  # padding is never taken
                with recorded() as collectives:
                    best = top_columns(local, k, VocabShard(start, stop - start, V, dist.group.WORLD))
                found.append((*best, len(collectives)))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_on_shards(world: int) -> None:
    ranks = run_world(world, _on_shards, world)
    for results in zip(*ranks, strict=True):
        values, ids, collectives = results[0]
        dtype = torch.float32
        want = by_sorting(make(dtype), ids.shape[1])
        assert torch.equal(values, want[0]) and torch.equal(ids, want[1]) and collectives == 2
        assert all(torch.equal(values, other[0]) and torch.equal(ids, other[1]) for other in results)
