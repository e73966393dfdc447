"""Top-k, top-p and recorded kept sets on real shards against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.testing.pool import run_world
from parallel_rl.validation import validation
from parallel_rl.vocab.truncated_stats import truncated_token_stats
from tests.collectives import recorded
from tests.vocab.sorted_rows import kept_by_sorting
from tests.vocab.test_truncation import RULES, T, V, check, dense, make, recorded_sets


def shard(z: Tensor, rank: int, world: int, kind: str) -> tuple[Tensor, dict]:
    """Even shards with padding that must not be read, `torch.chunk`'s, or nearly all columns on the last rank."""
    if kind == "padded":
        width = -(-V // world) + 2
        whole = torch.cat([z, torch.full((T, width * world - V), 1e4).to(z)], 1)
        return whole[:, rank * width : (rank + 1) * width].contiguous(), {"vocab_size": V}
    if kind == "chunk":
        width = -(-V // world)
        return z[:, rank * width : (rank + 1) * width].contiguous(), {"vocab_size": V}
    bounds = [0, *range(1, world), V]
    return z[:, bounds[rank] : bounds[rank + 1]].contiguous(), {"vocab_size": V, "vocab_start": bounds[rank]}


def on_shards(rank: int, world: int, kind: str) -> dict[str, tuple]:
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        z, targets, upstream = make(dtype)
        rules = [*RULES[:3], {"kept_ids": recorded_sets(z, targets)[0]}]
        for number, rule in enumerate(rules):
            local, span = shard(z, rank, world, kind)
            leaf = local.requires_grad_()
            with validation("never"), recorded() as forward:
                stats = truncated_token_stats(leaf, targets, group=dist.group.WORLD, **span, **rule)
            with recorded() as backward:
                torch.autograd.backward(list(stats[:3]), [g.to(stats.lse.dtype) for g in upstream])  # type: ignore[arg-type]
            assert leaf.grad is not None
            outputs = [x.detach() for x in stats if x is not None]
            found[f"{dtype} {number}"] = outputs, leaf.grad, forward, backward
    return found


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        *((2, kind) for kind in ("padded", "named")),
        pytest.param(4, "chunk", marks=pytest.mark.slow),
    ],
)
def test_on_shards(world: int, kind: str) -> None:
    ranks = run_world(world, on_shards, world, kind)
    passes = {torch.float64: 22, torch.float32: 11, torch.bfloat16: 6}
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        z, targets, upstream = make(dtype)
        ids, replayed = recorded_sets(z, targets)
        for number, rule in enumerate([*RULES[:3], {"kept_ids": ids}]):
            results = [rank[f"{dtype} {number}"] for rank in ranks]
            for outputs, _, forward, backward in results:
                for mine, first in zip(outputs, results[0][0], strict=True):
                    assert torch.equal(mine, first)
                search = ["allreduce_ SUM"] * passes[dtype]
                both = "top_k" in rule and "top_p" in rule
                # the window, the bins, the largest logit, what lies above the brackets; then the digits, top-k's first
                two = ["allreduce_ MAX", "allreduce_ SUM"] * 2 if "top_p" in rule else []
                digits = [*search, "allreduce_ SUM", *search] if both else [] if "kept_ids" in rule else search
                again = [*search, "allreduce_ MAX", *search] if both else []  # a row has fewer words than k
                assert forward == [*two, *digits, *again, "_allgather_base_"] and backward == []
            keep = replayed if "kept_ids" in rule else kept_by_sorting(z, **rule)
            want = dense(z, keep, targets, upstream, rule.get("temperature", 1.0))
            if kind == "padded":
                grads = [
                    grad[:, : max(0, min(len(grad[0]), V - i * len(grad[0])))]
                    for i, (_, grad, *_) in enumerate(results)
                ]
                assert all(
                    not grad[:, kept.shape[1] :].any() for (_, grad, *_), kept in zip(results, grads, strict=True)
                )
            else:
                grads = [grad for _, grad, *_ in results]
            check([*results[0][0], torch.cat(grads, 1)], want, tolerance)
            # the kept set, hence where the gradient is 0, does not depend on the split
            one = z.clone().requires_grad_()
            outputs = truncated_token_stats(one, targets, **rule)
            torch.autograd.backward(list(outputs[:3]), [g.to(outputs.lse.dtype) for g in upstream])  # type: ignore[arg-type]
            assert one.grad is not None and torch.equal(one.grad == 0, torch.cat(grads, 1) == 0)
