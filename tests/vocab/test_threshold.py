"""The thresholds of top-p from few reads of the logits, against each digit from a read of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_rl.testing.pool import run_world
from parallel_rl.vocab import threshold
from parallel_rl.vocab.sampling import sample_keys, sample_tokens
from parallel_rl.vocab.shards import Truncation, VocabShard
from parallel_rl.vocab.threshold import kept_floor
from parallel_rl.vocab.truncated_stats import truncated_token_stats

V = 4096
RULES = [
    Truncation(None, 0.9),
    Truncation(40, 0.9),
    Truncation(1500, 0.5),
    Truncation(None, 1 - 1e-12),
    Truncation(V - 1, 1e-9),
]


def rows_of_every_kind(dtype: torch.dtype) -> Tensor:
    """Rows that bins suit, and rows that they do not: ties without number, one word, words without mass, gaps, steps."""
    g = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(24, V, generator=g, dtype=torch.float64)
    z[1] *= 1e-4
    z[2] = 0.25
    z[3] = torch.where(torch.arange(V) % 3 == 0, 1.0, -1.0)
    z[4] = -40.0
    z[4, 777] = 5.0
    z[5, 5:] = -math.inf
    z[6] = z[6].mul(4).round() / 4
    z[7] = torch.linspace(-1, 1, V, dtype=torch.float64) ** 9
    z[8] = z[8] * 1e-30
    z[9] += 3e4 if dtype == torch.float16 else 3e8
    z[10] = -torch.arange(V, dtype=torch.float64).log()
    z[11] = -torch.arange(V, dtype=torch.float64)
    z[12, :2000] = z[12].amax()
    z[13] = torch.where(torch.arange(V) < 2, 0.0, -50 - z[13].abs())  # two words hold all, and half is a boundary
    z[14] = torch.where(torch.arange(V) % 2 == 0, 0.0, -0.0)
    z[15] = math.nan
    z[16, 3] = math.inf
    return z.to(dtype)


def by_reads_of_all(z: Tensor, shard: VocabShard, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(threshold._Search, "in_candidates", lambda search, z: torch.full((len(z), 1), math.inf))
        return kept_floor(z, shard)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.float64, torch.float16))],
    ids=str,
)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_few_reads_find_the_same_threshold(
    rule: Truncation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects the exactness of the bins' answer and the way back where they have none."""
    z = rows_of_every_kind(dtype)
    heat = torch.linspace(0.3, 3, len(z), dtype=torch.float64)
    for temperature in (1.0, heat):
        shard = VocabShard(0, V, V, truncation=rule, temperature=temperature, backend="eager")
        finite = z.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(1) < math.inf
        finite &= ~z.isnan().any(1)
        torch.testing.assert_close(
            kept_floor(z, shard)[finite], by_reads_of_all(z, shard, monkeypatch)[finite], rtol=0, atol=0
        )


def test_most_rows_need_no_more_reads() -> None:
    """The way back would pass every test of values by itself."""
    z = 3 * torch.randn(64, V, generator=torch.Generator().manual_seed(1))
    for rule in (Truncation(None, 0.9), Truncation(40, 0.9)):
        search = threshold._Search(rule.top_k, rule.top_p, torch.ones(1, 1).double(), V, None, "eager")
        assert bool(search.in_candidates(z).isfinite().all())


BOUNDS = {"even": [0, 2048, 4096], "uneven": [0, 100, 4096], "empty": [0, 4096, 4096]}
OF_DTYPES = {torch.float32: RULES[:2], torch.bfloat16: RULES[2:]}


def on_shards(rank: int) -> dict[tuple, Tensor]:
    found = {}
    for dtype, rules in OF_DTYPES.items():
        z = rows_of_every_kind(dtype)[:15]
        for rule in rules:
            for kind, bounds in BOUNDS.items():
                start, end = bounds[rank : rank + 2]
                shard = VocabShard(start, end - start, V, dist.group.WORLD, 0.8, truncation=rule, backend="eager")
                found[dtype, rule, kind] = kept_floor(z[:, start:end], shard)
    return found


def test_every_split_finds_the_same_threshold() -> None:
    ranks = run_world(2, on_shards)
    for dtype, rules in OF_DTYPES.items():
        for rule in rules:
            whole = VocabShard(0, V, V, None, 0.8, truncation=rule, backend="eager")
            want = kept_floor(rows_of_every_kind(dtype)[:15], whole)
            for kind in BOUNDS:
                assert all(torch.equal(rank[dtype, rule, kind], want) for rank in ranks), kind


class Passes(TorchDispatchMode):
    """Counts walks down the rows of some memory: going back to rows above is a new one, and so is an operator on all rows."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.of = {z.untyped_storage().data_ptr(): (z.stride(0), z.numel())}
        self.passes, self.at = 0, math.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and (known := self.of.get(x.untyped_storage().data_ptr())):
                    self.touch(x, *known)
        return made

    def touch(self, x: Tensor, stride: int, whole: int) -> None:
        if x.dim() != 2 or x.stride(1) != 1:  # some columns
            return
        first = x.storage_offset() // stride
        if first < self.at or x.numel() == whole:
            self.passes += 1
        self.at = first


@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("rule", [{"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_a_forward_of_top_p_reads_the_logits_three_times(rule: dict, consume: bool) -> None:
    """Bins, candidates, and the statistics with the cut; the draw has its noise for the last. A fourth read fails here."""
    z = 3 * torch.randn(320, V, generator=torch.Generator().manual_seed(2))
    targets = z.argmax(1)
    leaf = (z * 1).requires_grad_() * 1
    passes = Passes(leaf)
    with passes:
        stats = truncated_token_stats(leaf, targets, consume_logits=consume, entropy=True, backend="eager", **rule)
    assert passes.passes == 3
    assert bool(stats.logprobs.isfinite().all())
    passes = Passes(z)
    with passes:
        sample_tokens(z, sample_keys(0, targets, targets), **rule)
    assert passes.passes == 3


def test_temperatures_of_rows_follow_the_rows_that_are_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    z = rows_of_every_kind(torch.float32)[:8]
    shard = VocabShard(0, V, V, truncation=RULES[0], temperature=torch.linspace(0.2, 4, 8), backend="eager")
    assert torch.equal(kept_floor(z, shard), by_reads_of_all(z, replace(shard), monkeypatch))
