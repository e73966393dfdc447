"""The thresholds of top-k and top-p by kernels: those of a CPU, bit for bit, on every split, in two reads if rows allow."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.validation import validation
from parallel_rl.vocab.backends.triton import threshold
from parallel_rl.vocab.brackets import capacity
from parallel_rl.vocab.shards import Truncation, VocabShard
from parallel_rl.vocab.threshold import kept_floor
from parallel_rl.vocab.truncated_stats import truncated_token_stats
from tests.collectives import recorded
from tests.vocab.triton_cases.common import DEVICE
from tests.vocab.triton_cases.ranks import over_ranks

V = 1501
RULES = [
    Truncation(None, 0.9),
    Truncation(20, 0.9),
    Truncation(500, 0.5),
    Truncation(V - 1, 1e-9),
    Truncation(None, 1 - 1e-12),
    Truncation(7, None),
]


@cache
def rows_of_every_kind(dtype: torch.dtype) -> Tensor:
    """Rows that bins suit, and rows that they do not: ties without number, one word, words without mass, gaps, steps."""
    g = torch.Generator().manual_seed(0)
    z, words = 3 * torch.randn(18, V, generator=g, dtype=torch.float64), torch.arange(V)
    z[1] *= 1e-4
    z[2] = 0.25
    z[3] = torch.where(words % 3 == 0, 1.0, -1.0)
    z[4] = -40.0
    z[4, 777] = 5.0
    z[5, 5:] = -math.inf
    z[6] = z[6].mul(4).round() / 4
    z[7] = torch.linspace(-1, 1, V, dtype=torch.float64) ** 9
    z[8] *= 1e-30
    z[9] += 3e4 if dtype == torch.float16 else 3e8
    z[10] = -(words + 1).double().log()
    z[11] = -words.double()
    z[12, :600] = z[12].amax()
    z[13] = torch.where(words < 2, 0.0, -50 - z[13].abs())  # two words hold all, and half is a boundary
    z[14] = torch.where(words % 2 == 0, 0.0, -0.0)
    z[15] = -math.inf
    z[16] = torch.where(words % 2 == 0, -math.inf, z[16] * 30)
    return z.to(dtype)


def shard_of(rule: Truncation, temperature: float | Tensor = 1.0) -> VocabShard:
    return VocabShard(0, V, V, truncation=rule, temperature=temperature, backend="triton")


def on_host(z: Tensor, shard: VocabShard) -> Tensor:
    heat = shard.temperature
    return kept_floor(z, replace(shard, backend="eager", temperature=heat.cpu() if isinstance(heat, Tensor) else heat))


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [
        (torch.bfloat16, RULES[1]),
        (torch.bfloat16, RULES[4]),
        (torch.float32, RULES[0]),
        (torch.float16, RULES[5]),
    ],
    ids=str,
)
def test_the_threshold_of_a_cpu(dtype: torch.dtype, rule: Truncation) -> None:
    """Top-p, top-k and both; ordinary rows under the fourth rule, and float32 under both, are below."""
    z = rows_of_every_kind(dtype)
    shard = shard_of(rule, torch.linspace(0.3, 3, len(z)).to(DEVICE) if dtype == torch.bfloat16 else 0.8)
    assert torch.equal(kept_floor(z.to(DEVICE), shard).cpu(), on_host(z, shard))


@pytest.mark.parametrize("columns", [1, 2, 37, 1024])
def test_strides_and_widths(columns: int) -> None:
    """Columns of wider rows, every second one of them, and rows that are split over programs."""
    wide = rows_of_every_kind(torch.bfloat16)[[0, 1, 6, 17]]
    for z in (wide[:, 3 : 3 + columns], wide[:, : 2 * columns : 2]):
        shard = replace(shard_of(RULES[0]), valid=z.shape[1], vocab_size=z.shape[1])
        assert torch.equal(kept_floor(z.to(DEVICE), shard).cpu(), on_host(z, shard))


def test_rows_that_are_split_over_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "processors", lambda device: 1)
    """A row that bins suit and one that misses, under top-p alone and under both."""
    g = torch.Generator().manual_seed(3)
    width = 4505
    z = torch.cat([3 * torch.randn(1, width, generator=g), torch.ones(1, width)])
    for rule in (Truncation(None, 0.9), Truncation(40, 0.9)):
        shard = replace(shard_of(rule), valid=width, vocab_size=width)
        assert torch.equal(kept_floor(z.to(DEVICE), shard).cpu(), on_host(z, shard))
    assert threshold._tiling("held", z).splits > 1


def test_ordinary_rows_are_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that miss would pass every test of values by themselves; those that do not are not looked at for a digit."""
    searched, held = [], threshold.vocab_held

    def poisoned(z: Tensor, missed: Tensor, *rest: object) -> Tensor:
        searched.append(missed)
        return held(torch.where(missed, z, torch.nan), missed, *rest)

    monkeypatch.setattr(threshold, "vocab_held", poisoned)
    g = torch.Generator().manual_seed(1)
    z = 3 * torch.randn(3, V, generator=g)
    z[0] = 0.5 * torch.randn(V, generator=g)
    z[1, 300] += 20
    for rule in (RULES[0], RULES[1], RULES[3]):
        shard = shard_of(rule)
        assert torch.equal(kept_floor(z.to(DEVICE), shard).cpu(), on_host(z, shard))
        assert not bool(torch.cat(searched).any())


BOUNDS = {"even": [0, 751, V], "uneven": [0, 100, V], "empty": [0, V, V]}


SPLITS = [
    (torch.bfloat16, RULES[0], "uneven"),
    (torch.float32, RULES[1], "even"),
    (torch.bfloat16, RULES[2], "empty"),
]


#: an ordinary row, and of those that bins do not suit: ties, one word, a tie at the top, −inf throughout
ON_RANKS = [0, 3, 4, 12, 15]


def on_shards(rank: int) -> list[tuple[Tensor, list[str]]]:
    found = []
    for dtype, rule, kind in SPLITS:
        start, end = BOUNDS[kind][rank : rank + 2]
        shard = replace(shard_of(rule, 0.8), start=start, valid=end - start, group=dist.group.WORLD)
        with recorded() as calls:
            floor = kept_floor(rows_of_every_kind(dtype)[ON_RANKS, start:end].to(DEVICE), shard)
        found.append((floor.cpu(), calls))
    return found


def test_every_split_finds_the_same_threshold() -> None:
    ranks = over_ranks(2, on_shards)
    for (dtype, rule, kind), (floor, calls), (other, same) in zip(SPLITS, *ranks, strict=True):
        assert torch.equal(floor, other) and calls == same, kind
        assert torch.equal(floor, on_host(rows_of_every_kind(dtype)[ON_RANKS], shard_of(rule, 0.8))), kind
        digits = ["allreduce_ SUM"] * {torch.float32: 11, torch.bfloat16: 6}[dtype]
        # the window, the bins, the largest logit, what lies above the brackets: whatever rows miss
        before = ["allreduce_ MAX", "allreduce_ SUM"] * 2 if rule.top_p else []
        both = [*digits, "allreduce_ SUM"] if rule.top_p and rule.top_k else []
        assert calls == [*before, *both, *digits]


def test_a_bracket_holds_its_lower_end_and_not_its_upper() -> None:
    """Both ends are logits of the row: a threshold that is one of them was seen by no whole search."""
    z = rows_of_every_kind(torch.float32)[[0, 17]].to(DEVICE)
    order = z.sort(1, descending=True).values
    high, low = order[:, [10, 40]], order[:, [30, 90]]
    top, inv_t = order[:, :1].double(), torch.ones(2, 1, dtype=torch.float64, device=DEVICE)
    unit = torch.full((1, 1), 2.0**40, dtype=torch.float64, device=DEVICE)
    sums, values, number = threshold.vocab_weigh(z, low, high, top, inv_t, unit, capacity(V))
    mass = ((z.double() - top).exp() * unit).long()
    for row in range(2):
        for bracket in range(2):
            inside = z[row][(z[row] >= low[row, bracket]) & (z[row] < high[row, bracket])].sort().values
            assert torch.equal(values[bracket, row, : number[bracket, row]].sort().values, inside)
        (k_high, p_high), (k_low, p_low) = high[row], low[row]
        assert sums[row, :2].tolist() == [int((z[row] >= k_high).sum()), int((z[row] >= k_low).sum())]
        above = [int(mass[row][z[row] >= end].sum()) for end in (k_high, p_high, p_low)]
        assert sums[row, 2:].tolist() == pytest.approx(above, rel=1e-9)  # a card's exp may differ in the last bit


def test_opcheck_of_a_threshold() -> None:
    z, most = rows_of_every_kind(torch.bfloat16)[:3].to(DEVICE), capacity(V)
    end, rate = torch.full((3, 1), 5.0, device=DEVICE), torch.full((3, 1), 9.0, device=DEVICE)
    inv_t, unit = (
        torch.ones(3, 1, dtype=torch.float64, device=DEVICE),
        torch.full((1, 1), 2.0**40, device=DEVICE).double(),
    )
    torch.library.opcheck(threshold.vocab_bins, (z, end, rate, inv_t, 128))
    low, high = torch.cat([end - 4, end - 3], 1), torch.cat([end - 3, end - 2], 1)
    weigh = (z, low, high, end.double(), inv_t, unit, most)
    # memory that was not written has any values
    torch.library.opcheck(threshold.vocab_weigh, weigh, test_utils=("test_schema", "test_faketensor"))
    _, values, found = threshold.vocab_weigh(*weigh)
    missed, before = end > 6, torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
    for scale in ((), (end - 9, end.double(), inv_t, unit)):
        bounds = end - torch.ones(3, 8, device=DEVICE)
        torch.library.opcheck(threshold.vocab_held, (z, missed, values[0], found[0], before, scale, bounds))


def test_one_graph_of_a_truncated_policy() -> None:
    z = rows_of_every_kind(torch.bfloat16)[[0, 2]].to(DEVICE)
    targets = z.argmax(1)

    def both(z: Tensor) -> Tensor:
        stats = truncated_token_stats(z, targets, top_k=40, top_p=0.9, backend="triton")
        return stats.logprobs + stats.lse

    with validation("never"):
        assert torch.equal(torch.compile(both, backend="aot_eager", fullgraph=True)(z), both(z))
