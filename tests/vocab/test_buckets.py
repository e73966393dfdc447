"""Log-probs of chosen columns beside one bucket of all others, against the whole logits in float64."""

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
from parallel_rl.vocab.topk import bucketed_log_probs
from tests.collectives import recorded
from tests.vocab.test_topk import shard

T, V, K = 9, 11, 4


def make() -> tuple[Tensor, Tensor, Tensor]:
    """Logits whose chosen columns hold all but about 1e-7 in odd rows; row 3 is not kept, in row 4 no other word is left."""
    g = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(T)])
    logits = torch.randn(T, V, generator=g, dtype=torch.float64)
    logits[1::2] = logits[1::2].scatter_add(1, ids[1::2], torch.full((T, K), 16.0, dtype=torch.float64)[1::2])
    logits[4] = torch.full((V,), -math.inf, dtype=torch.float64).scatter(0, ids[4], logits[4, ids[4]])
    return logits.float().double(), ids, torch.randn(T, K + 1, generator=g, dtype=torch.float64)


def dense(logits: Tensor, ids: Tensor, upstream: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Values, and the gradient on the logits, of softmax over the row with the others added up by themselves."""
    leaf = logits.clone().requires_grad_()
    log_q = (leaf / temperature).log_softmax(1)
    rest = log_q.exp().scatter(1, ids, 0.0).sum(1, keepdim=True)
    out = torch.cat([log_q.gather(1, ids), torch.where(rest > 0, rest, 1.0).log()], 1)
    out.backward(upstream)
    assert leaf.grad is not None
    return torch.where(
        torch.cat([rest > 0] * (K + 1), 1) | (torch.arange(K + 1) < K), out.detach(), -math.inf
    ), leaf.grad


def on_shard(rank: int, world: int, kind: str) -> tuple[Tensor, Tensor, list[str], list[str]]:
    logits, ids, upstream = make()
    upstream[4, K] = 0  # no gradient reaches what is not there
    keep = torch.arange(T) != 3
    local, read = shard(logits, rank, world, kind)
    read = replace(read, group=dist.group.WORLD if world > 1 else None, temperature=0.7, consume_logits=True)
    local[3], ids[3] = math.nan, torch.tensor([-7, 10**6, V, 2])
    leaf = local.requires_grad_()
    with validation("never"), recorded() as forward:
        out = bucketed_log_probs(leaf * 1.0, ids, keep, read)
    with recorded() as backward:
        out.backward(upstream)
    assert leaf.grad is not None and not leaf.grad[:, read.valid :].any()
    return out.detach(), leaf.grad[:, : read.valid], forward, backward


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        (1, "even"),
        (4, "named"),
        *(pytest.param(w, k, marks=pytest.mark.slow) for w in (2, 4) for k in ("even", "chunk")),
    ],
)
def test_on_shards(world: int, kind: str) -> None:
    logits, ids, upstream = make()
    upstream[4, K] = 0
    want, gradient = dense(logits, ids, upstream, 0.7)
    want[3], gradient[3] = 0, 0
    ranks = run_world(world, on_shard, world, kind)
    for out, _, forward, backward in ranks:
        assert torch.equal(out, ranks[0][0])
        torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-15)
        assert forward == (["allreduce_ SUM", "_allgather_base_"] if world > 1 else []) and backward == []
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks], 1), gradient, rtol=1e-11, atol=1e-16)


@pytest.mark.parametrize("shift", [0.0, 3e4])
def test_float32_keeps_the_digits_of_a_small_rest(shift: float) -> None:
    """One minus the sum of the chosen would be off by 1e-7 in float32, which is all of the rest of the odd rows."""
    logits, ids, upstream = make()
    logits = (logits.float() + shift).double()
    want, gradient = dense(logits, ids, upstream, 1.0)
    z = logits.float().requires_grad_()
    out = bucketed_log_probs(z, ids, torch.ones(T, dtype=torch.bool), VocabShard.of(V))
    out.backward(upstream)
    rows = torch.arange(T) != 4
    torch.testing.assert_close(out.detach()[rows], want[rows], rtol=3e-7, atol=1e-12)
    assert z.grad is not None
    others = torch.ones(T, V).scatter(1, ids, 0.0).bool() & rows[:, None]
    torch.testing.assert_close(z.grad[others].double(), gradient[others], rtol=5e-5, atol=0)


def test_gradcheck_and_no_second_derivative() -> None:
    logits, ids, _ = make()
    logits, ids, keep = logits[[0, 2, 5]], ids[[0, 2, 5]], torch.tensor([True, True, False])
    z = logits.requires_grad_()
    read = VocabShard.of(V, temperature=1.3)
    assert torch.autograd.gradcheck(lambda z: bucketed_log_probs(z, ids, keep, read), z)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(bucketed_log_probs(z, ids, keep, read).sum(), z, create_graph=True)
