"""Rows with several targets against the same rows copied once a target, on one shard and on two."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.testing.pool import preload, run_world
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.stats import TokenStats, stats_of_edges, stats_of_shard
from tests.collectives import recorded

preload("tests.vocab.test_edges")

WIDTH = 12
ROWS = torch.tensor([0, 1, 1, 2, 4, 4, 4])  # row 3 has no target, row 5 is not kept
TARGETS = torch.tensor([3, 0, 7, 11, 0, 6, 5])
BRANCHES = torch.tensor([1, 1, 4, 4, 4])
EDGES = torch.tensor([0, 6, 7, 2, 8, 9, 10])  # of each target above
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def stats(
    logits: Tensor, group: dist.ProcessGroup | None, temperature: Tensor | float, edges: bool, **options: bool
) -> TokenStats:
    """Statistics of each target, by its edge or from a copy of its row."""
    rows = temperature if isinstance(temperature, float) or edges else temperature[ROWS]
    shard = VocabShard.of(logits.shape[-1], group, temperature=rows, **options)
    if not edges:
        return stats_of_shard(logits[ROWS], TARGETS, torch.ones(len(ROWS), dtype=torch.bool), shard)
    targets = torch.tensor([3, -1, 11, -1, -1, -1, 0, 7, 0, 6, 5])
    keep = torch.tensor([True, True, True, True, True, False])
    made = stats_of_edges(logits, targets, keep, shard, BRANCHES)
    per_row = (None if x is None else x[ROWS] for x in (made.entropy, made.lse, made.sum_pi_squared))
    return TokenStats(made.logprobs[EDGES], *per_row)  # type: ignore[arg-type]


def gradient(
    whole: Tensor, group: dist.ProcessGroup | None, temperature: Tensor | float, edges: bool, **options: bool
) -> list[Tensor]:
    parts, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    mine = whole.chunk(parts, -1)[rank].contiguous()
    logits = mine.clone().requires_grad_()
    read = stats(logits * 1, group, temperature, edges, **options)
    weights = torch.linspace(-1, 2, len(ROWS), dtype=read.logprobs.dtype)
    total = (read.logprobs * weights).sum() + (read.lse * weights.square()).sum()
    if read.entropy is not None:
        total = total + (read.entropy * weights.cos()).sum()
    total.backward()
    assert logits.grad is not None
    return [x.detach() for x in (*read, logits.grad) if x is not None]


def compare(rank: int, world: int) -> list[str]:
    """Every case on one group; the names of those that differ."""
    group = dist.group.WORLD if world > 1 else None
    wrong = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        whole = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype) * 3
        whole[5] = torch.nan
        for temperature in (1.0, torch.linspace(0.5, 2, 6)):
            for options in (
                {"entropy": False},
                {"entropy": True},
                {"entropy": True, "sum_pi_squared": True},
                {"entropy": True, "consume_logits": True},
            ):
                pair = [gradient(whole, group, temperature, edges, **options) for edges in (True, False)]
                for place, (tree, copied) in enumerate(zip(*pair, strict=True)):
                    bound = BOUNDS[
                        torch.bfloat16 if place == len(pair[0]) - 1 and dtype == torch.bfloat16 else tree.dtype
                    ]
                    if (apart := (tree.double() - copied.double()).norm()) > bound * copied.double().norm():
                        wrong.append(f"{dtype} {options} {place}: {apart}")
    return wrong


def test_edges_equal_copied_rows() -> None:
    assert compare(0, 1) == []


def test_edges_equal_copied_rows_on_two_shards() -> None:
    assert run_world(2, compare, 2) == [[], []]


def test_an_entry_is_rounded_once() -> None:
    """In bfloat16 the entry at a branch's target is the rounded sum, not the sum of rounded parts."""
    whole = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    whole[5] = 0.0
    logits = whole.bfloat16()
    exact = gradient(logits.double(), None, 1.0, edges=True)[-1]
    rounded = gradient(logits, None, 1.0, edges=True)[-1]
    spacing = torch.finfo(torch.bfloat16).eps / 2
    assert ((rounded.double() - exact).abs() <= spacing * exact.abs() * 1.01 + 1e-7).all()


def collectives(rank: int) -> list[str]:
    logits = torch.randn(6, WIDTH // 2).requires_grad_()
    with recorded() as seen:
        read = stats(logits, dist.group.WORLD, 1.0, edges=True)
        (read.logprobs.sum() + read.lse.sum()).backward()
    return seen


def test_branches_cost_no_collective() -> None:
    assert run_world(2, collectives) == [["_allgather_base_"]] * 2
