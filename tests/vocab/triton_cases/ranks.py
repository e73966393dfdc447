"""The kernels on real ranks: 2 and 4 shards against float64, the same bits everywhere, one collective."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import token_stats
from parallel_rl.testing.pool import run_world
from parallel_rl.validation import validation
from tests.collectives import recorded
from tests.vocab.triton_cases.common import DEVICE, INTERPRETED, error, logits_and_targets, run, upstream

T = 5
DTYPES = [(torch.float32, 300.0), (torch.bfloat16, 0.0), (torch.float16, 0.0)]
# (vocab_size given?, V, width of a rank's shard by number of ranks): even; padded; torch.chunk; the last ranks all padding
SPLITS = {
    "even": (False, 48, lambda tp, rank: 48 // tp),
    "padded": (True, 45, lambda tp, rank: 48 // tp),
    "chunk": (True, 45, lambda tp, rank: min(-(-45 // tp), 45 - rank * -(-45 // tp))),
    "all padding": (True, 20, lambda tp, rank: 24),
}


def columns(split: str, tp: int, rank: int) -> tuple[int, int, int]:
    """(first column, width, real columns) of a rank."""
    _, vocab, width_of = SPLITS[split]
    start = sum(width_of(tp, r) for r in range(rank))
    return start, width_of(tp, rank), max(0, min(width_of(tp, rank), vocab - start))


def shard_case(rank: int, tp: int, split: str, dtype: torch.dtype, shift: float) -> dict[str, Tensor]:
    sized, vocab, _ = SPLITS[split]
    logits, targets = logits_and_targets(T, vocab, dtype, shift)
    targets[3] = -100
    start, width, real = columns(split, tp, rank)
    z = torch.full((T, width), torch.nan, dtype=dtype, device=DEVICE)
    z[:, :real] = logits[:, start : start + real]
    out = run(z, targets, upstream(T), "triton", group=dist.group.WORLD, vocab_size=vocab if sized else None)
    if split == "chunk":
        again = run(z, targets, upstream(T), "triton", group=dist.group.WORLD, vocab_size=vocab)
        assert all(torch.equal(value, again[name]) for name, value in out.items()), "a repeat gives other bits"
    assert not out["gradient"][:, real:].any()
    return {name: value.cpu() for name, value in out.items()} | {"gradient": out["gradient"][:, :real].cpu()}


def shard_cases(rank: int, tp: int) -> dict[tuple, dict[str, Tensor]]:
    """Every dtype on one split of two ranks alone: a dtype is nothing to the sums over ranks. Four ranks: the odd splits."""
    return {
        (s, d, shift): shard_case(rank, tp, s, d, shift)
        for s in (SPLITS if tp == 2 else ("chunk", "all padding"))
        for d, shift in DTYPES[: 3 if (tp, s) == (2, "padded") else 1]
    }


def over_ranks(tp: int, function, *args):  # type: ignore[no-untyped-def]
    if INTERPRETED:
        return run_world(tp, function, *args, timeout=300)
    from benchmarks.common import run_ranks  # the pool's ranks see no card

    return run_ranks(tp, function, *args)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_give_what_one_process_gives(tp: int) -> None:
    ranks = over_ranks(tp, shard_cases, tp)
    for split, dtype, shift in ranks[0]:
        mine = [rank[split, dtype, shift] for rank in ranks]
        logits, targets = logits_and_targets(T, SPLITS[split][1], dtype, shift)
        targets[3] = -100
        truth = run(logits, targets, upstream(T), "eager", torch.float64)
        plain = run(logits, targets, upstream(T), "eager")
        for name, want in truth.items():
            if name == "gradient":
                got = torch.cat([rank[name] for rank in mine], dim=1).to(DEVICE)
            else:
                got = mine[0][name].to(DEVICE)
                assert all(torch.equal(got.cpu(), rank[name]) for rank in mine), f"{split}: other bits of {name}"
            limit = 2 * error(plain[name], want) + 1e-7
            assert error(got, want) <= limit, f"{split} {dtype} {name}: {error(got, want):.1e} > {limit:.1e}"
            assert not bool(got[3].any())


def count_case(rank: int) -> tuple[list[str], list[str]]:
    logits, targets = logits_and_targets(T, 24, torch.float32)
    z = logits.requires_grad_()
    with validation("never"), recorded() as forward:
        stats = token_stats(z, targets, group=dist.group.WORLD, backend="triton")
    with recorded() as backward:
        torch.autograd.backward(list(stats[:3]), upstream(T))
    return forward, backward


def test_one_collective_forward_and_none_backward() -> None:
    for forward, backward in over_ranks(2, count_case):
        assert forward == ["_allgather_base_"]
        assert backward == []


def compiled_case(rank: int) -> float:
    logits, targets = logits_and_targets(T, 24, torch.float32, seed=rank)

    def loss(z: Tensor) -> Tensor:
        stats = token_stats(z, targets, group=dist.group.WORLD, backend="triton")
        return (stats.logprobs * stats.lse).sum()

    gradients = []
    with validation("never"):
        for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
            z = logits.clone().requires_grad_()
            function(z).backward()
            gradients.append(z.grad)
    return error(*gradients)  # type: ignore[arg-type]


def test_one_graph_with_the_collective_in_it() -> None:
    assert max(over_ranks(2, compiled_case)) < 1e-6
