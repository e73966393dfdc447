"""Chosen and largest columns of vocabulary shards against the whole logits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.testing.pool import run_world
from parallel_rl.validation import validation
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.topk import check_columns, column_log_probs, gather_columns, top_columns
from tests.collectives import recorded

T, V, K = 9, 11, 4
ALL = torch.ones(T, dtype=torch.bool)


def make(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, columns (one row names a column twice) and upstream gradients."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(T)])
    ids[2] = torch.tensor([0, V - 1, 0, 5])
    return (
        torch.randn(T, V, generator=g, dtype=torch.float64),
        ids,
        torch.randn(T, K, generator=g, dtype=torch.float64),
    )


def shard(logits: Tensor, rank: int, world: int, kind: str) -> tuple[Tensor, VocabShard]:
    """Padded to even widths, cut as `torch.chunk` does, or one column on rank 0 and all others on rank 1."""
    if kind == "named":
        bounds = [0, *([1] if world > 1 else []), *[V] * world]
        start, stop = bounds[rank], bounds[rank + 1]
        return logits[:, start:stop].contiguous(), VocabShard(start, stop - start, V)
    width = -(-V // world)
    if kind == "even":
        padded = torch.cat([logits, torch.full((T, (width + 2) * world - V), 1e4).to(logits)], 1)
        return padded[:, rank * (width + 2) : (rank + 1) * (width + 2)].contiguous(), VocabShard(
            rank * (width + 2), max(0, min(width + 2, V - rank * (width + 2))), V
        )
    return logits[:, rank * width : (rank + 1) * width].contiguous(), VocabShard(
        rank * width, max(0, min(width, V - rank * width)), V
    )


def gathered(rank: int, world: int, kind: str, dtype: torch.dtype) -> tuple:
    logits, ids, upstream = make()
    keep = torch.arange(T) != 3
    local, read = shard(logits.to(dtype), rank, world, kind)
    read = replace(read, group=dist.group.WORLD if world > 1 else None, temperature=0.7)
    local[3] = math.nan
    ids[3] = torch.tensor([-7, 10**6, V, 2])
    leaf = local.requires_grad_()
    with validation("never"), recorded() as forward:
        out = gather_columns(leaf, ids, keep, read)
    with recorded() as backward:
        torch.where(keep[:, None], out, 1.0).backward(upstream.to(out.dtype))
    best = top_columns(torch.where(keep[:, None], leaf.detach(), 0), 5, read)
    return out.detach(), leaf.grad[:, : read.valid], forward, backward, best


@pytest.mark.parametrize("kind", ["even", "chunk", "named"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_on_shards(world: int, kind: str) -> None:
    logits, ids, upstream = make()
    whole = logits.clone().requires_grad_()
    keep = (torch.arange(T) != 3)[:, None]
    want = torch.where(keep, whole.gather(1, ids) / 0.7, 0)
    want.backward(upstream)
    ranks = run_world(world, gathered, world, kind, torch.float64)
    for out, _, forward, backward, best in ranks:
        assert torch.equal(out, ranks[0][0])
        torch.testing.assert_close(out, want.detach(), rtol=1e-14, atol=0)
        assert forward == (["allreduce_ SUM"] if world > 1 else []) and backward == []
        values, columns = torch.where(keep, logits, 0).topk(5, dim=1)
        kept = keep[:, 0]
        assert torch.equal(best[0][kept], values[kept]) and torch.equal(best[1][kept], columns[kept])
        assert torch.equal(best[1], ranks[0][4][1])
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks], 1), whole.grad, rtol=1e-13, atol=0)


def test_low_precision_logits_are_read_as_float32() -> None:
    logits, ids, _ = make()
    z = logits.to(torch.bfloat16).requires_grad_()
    out = gather_columns(z, ids, ALL, VocabShard.of(V))
    assert out.dtype == torch.float32 and torch.equal(out, z.detach().float().gather(1, ids))
    out.sum().backward()
    assert z.grad is not None and z.grad.dtype == torch.bfloat16 and z.grad[2, 0] == 2


def test_gradcheck() -> None:
    logits, ids, _ = make()
    z = logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: gather_columns(z, ids, ALL, VocabShard.of(V, temperature=1.3)), z)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gather_columns(z, ids, ALL, VocabShard.of(V)).sum(), z, create_graph=True)


@pytest.mark.parametrize("consume", [False, True])
def test_column_log_probs_against_dense(consume: bool) -> None:
    """A column that is named twice gets both gradients; the entropy's gradient comes with them."""
    logits, ids, upstream = make()
    whole = logits.clone().requires_grad_()
    keep = torch.arange(T) != 3
    log_p = (whole / 0.7).log_softmax(1)
    want = log_p.gather(1, ids), -(log_p.exp() * log_p).sum(1)
    torch.where(keep, (want[0] * upstream).sum(1) + want[1] * upstream[:, 0], 0).sum().backward()
    z = torch.cat([logits, torch.full((T, 2), 1e4)], 1)
    z[3], ids[3] = math.nan, 10**6
    leaf = z.requires_grad_()
    read = VocabShard(0, V, V, temperature=0.7, consume_logits=consume)
    columns, entropy = column_log_probs(leaf * 1.0, ids, keep, read)
    torch.testing.assert_close(columns[keep], want[0][keep].detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(entropy[keep], want[1][keep].detach(), rtol=1e-13, atol=0)
    ((columns * upstream).sum(1) + entropy * upstream[:, 0]).sum().backward()
    assert leaf.grad is not None and not leaf.grad[:, V:].any() and not leaf.grad[3].any()
    torch.testing.assert_close(leaf.grad[:, :V], whole.grad, rtol=1e-11, atol=1e-15)


def test_log_probs_of_columns_keep_their_digits_far_from_zero() -> None:
    """Subtracting a log-sum-exp of 3e4 in float32 would leave two digits."""
    logits, ids, _ = make()
    far = (logits.float() + 3e4).double()
    columns, _ = column_log_probs(far.float(), ids, ALL, VocabShard.of(V))
    torch.testing.assert_close(columns.double(), far.log_softmax(1).gather(1, ids), rtol=1e-6, atol=1e-7)


def test_bad_input() -> None:
    logits, ids, _ = make()
    read = VocabShard.of(V)
    with pytest.raises(ValueError, match=r"ids = 11 at \[0, 0\] lies outside the vocabulary \[0, 11\)"):
        gather_columns(logits, torch.full_like(ids, V), ALL, read)
    with pytest.raises(ValueError, match=r"wide = -1 at \[1, 2\] lies outside the vocabulary \[0, 11\)"):
        check_columns("wide", torch.tensor([[0, 0, 0], [0, 0, -1]]), V)
    with pytest.raises(ValueError, match=r"ids must hold integers, got torch\.float32"):
        gather_columns(logits, ids.float(), ALL, read)
    with pytest.raises(ValueError, match=r"logits \[T, V/tp\] and ids \[T, K\] must agree, got \[9, 11\] and \[8, 4\]"):
        gather_columns(logits, ids[1:], ALL, read)
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"temperature = {temperature} must be positive and finite"):
            VocabShard.of(V, temperature=temperature)
    for k in (0, V + 1, True, 2.0):
        with pytest.raises(ValueError, match=rf"k = {k} must be an integer in \[1, vocab_size = 11\]"):
            top_columns(logits, k, read)
