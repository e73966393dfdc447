"""The fused head on vocabulary shards: real ranks, with hidden states whole or split along the sequence."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import linear_token_stats
from parallel_rl.testing.pool import run_world
from parallel_rl.validation import validation
from parallel_rl.vocab.linear.plan import LinearMode
from tests.collectives import recorded
from tests.vocab.linear.cases import D, N, Problem, V, dense, error, make

MODES: tuple[LinearMode, ...] = ("in_forward", "resident", "recompute", "auto")
ROWS = 28  # of N; multiples of 4


def columns(rank: int, size: int, split: str) -> list[int | None]:
    """even (padding, with 4 ranks one that is nothing else), or torch.chunk's."""
    if split == "chunk":
        chunk = -(-V // size)
        return list(range(rank * chunk, min((rank + 1) * chunk, V)))
    width = {1: V + 3, 2: 20, 4: 13}[size]
    return [c if c < V else None for c in range(rank * width, (rank + 1) * width)]


class Result(NamedTuple):
    stats: list[Tensor]
    loss: Tensor
    hidden: Tensor  # this rank's rows
    weight: Tensor  # [V, D] zeros beyond this rank's columns
    bias: Tensor
    padding: bool  # whether padding columns got a gradient


def cut(problem: Problem) -> Problem:
    keep = problem.keep[:ROWS]
    upstream = [torch.where(keep, g[:ROWS], 0) for g in problem.upstream]
    return problem._replace(hidden=problem.hidden[:ROWS], targets=problem.targets[:ROWS], upstream=upstream)


def every_row(split: str, dtype: torch.dtype) -> bool:
    """Whether no row is ignored, so that rows are taken as they lie."""
    return split == "chunk" and dtype != torch.float64


def one_case(rank: int, size: int, split: str, scatter: bool, dtype: torch.dtype, mode: LinearMode) -> Result:
    problem = cut(make(dtype, ignored=not every_row(split, dtype)))
    mine = columns(rank, size, split)
    real = [c for c in mine if c is not None]
    weight, bias = torch.full((len(mine), D), 1e4, dtype=dtype), torch.full((len(mine),), 1e4, dtype=dtype)
    weight[: len(real)], bias[: len(real)] = problem.weight[real].to(dtype), problem.bias[real].to(dtype)
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size) if scatter else slice(None)
    hidden = problem.hidden[rows].to(dtype, copy=True)
    hidden[~problem.keep[rows]] = torch.nan
    if every_row(split, dtype):
        hidden = hidden.t().contiguous().t()  # a collective takes it row by row
    for x in (hidden, weight, bias):
        x.requires_grad_()
    stats = linear_token_stats(
        hidden, weight, problem.targets, bias=bias, group=dist.group.WORLD, sequence_parallel=scatter, vocab_size=V,
        softcap=6.0, temperature=0.8, mode=mode, budget=1280 * dtype.itemsize,
        objective=problem.objective if mode == "in_forward" else None,
    )  # fmt: skip
    loss = problem.objective(stats) if stats.loss is None else stats.loss  # type: ignore[arg-type]
    (loss * 16).backward()
    of_weight, of_bias = torch.zeros(V, D), torch.zeros(V)
    assert hidden.grad is not None and weight.grad is not None and bias.grad is not None
    of_weight, of_bias = of_weight.to(dtype), of_bias.to(dtype)
    of_weight[real], of_bias[real] = weight.grad[: len(real)] / 16, bias.grad[: len(real)] / 16
    padding = bool(weight.grad[len(real) :].any()) or bool(bias.grad[len(real) :].any())
    kept = [x.detach() for x in stats[:3] if x is not None]
    return Result(kept, loss.detach(), hidden.grad / 16, of_weight, of_bias, padding)


def all_cases(rank: int, size: int) -> dict[tuple, Result]:
    return {
        (split, scatter, dtype, mode): one_case(rank, size, split, scatter, dtype, mode)
        for split in ("even", "chunk")
        for scatter in ((False, True) if size > 1 else (False,))
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        for mode in MODES
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_give_what_one_dense_process_gives(size: int) -> None:
    per_rank = run_world(size, all_cases, size, timeout=300)
    for (split, scatter, dtype, mode), first in per_rank[0].items():
        results = [found[split, scatter, dtype, mode] for found in per_rank]
        where = f"{split}, scatter {scatter}, {dtype}, {mode}"
        truth = dense(cut(make(dtype, ignored=not every_row(split, dtype))), softcap=6.0, temperature=0.8)
        exact = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6}[dtype]
        gradient = 3e-3 if dtype == torch.bfloat16 else exact
        for result in results:
            assert not result.padding, where
            assert torch.equal(result.loss, first.loss), f"{where}: ranks hold different bits"
            for mine, theirs, want in zip(result.stats, first.stats, truth.stats[:3], strict=True):
                assert torch.equal(mine, theirs), f"{where}: ranks hold different bits"
                assert error(mine, want) <= exact, where
        hidden = [torch.cat([r.hidden for r in results])] if scatter else [r.hidden for r in results]
        for found in hidden:
            assert error(found, truth.gradients[0]) <= gradient, where
        assert error(sum(r.weight for r in results), truth.gradients[1]) <= gradient, where  # type: ignore[arg-type]
        assert error(sum(r.bias for r in results), truth.gradients[2]) <= gradient, where  # type: ignore[arg-type]


def split_batch(rank: int, mode: LinearMode) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [S, B, D] that are split over S: (log-probs, gradient of this rank's part) and those of one process."""
    problem, found = make(ignored=False), []
    targets, temperature = problem.targets.view(10, 3), torch.linspace(0.5, 2, N, dtype=torch.float64).view(10, 3)
    for group, rows, columns in ((dist.group.WORLD, slice(rank * 5, rank * 5 + 5), slice(rank * 19, rank * 19 + 19)),
                                 (None, slice(None), slice(None))):  # fmt: skip
        hidden = problem.hidden.view(10, 3, D)[rows].requires_grad_()
        stats = linear_token_stats(
            hidden, problem.weight[columns], targets, group=group, sequence_parallel=group is not None, vocab_size=V,
            temperature=temperature, mode=mode, budget=1 << 13,
        )  # fmt: skip
        (stats.logprobs * temperature).sum().backward()
        assert hidden.grad is not None
        found += [stats.logprobs.detach(), hidden.grad]
    return found[0], found[1], found[2], found[3][rank * 5 : rank * 5 + 5]


@pytest.mark.parametrize("mode", ["resident", "recompute"])
def test_a_batch_that_is_split_over_its_first_dimension(mode: LinearMode) -> None:
    for logprobs, gradient, want, truth in run_world(2, split_batch, mode):
        assert error(logprobs, want) < 1e-12 and error(gradient, truth) < 1e-12


def collectives(rank: int, mode: LinearMode, scatter: bool) -> tuple[list[str], list[str]]:
    problem = make(torch.float32, ignored=False)
    rows = slice(rank * N // 2, (rank + 1) * N // 2) if scatter else slice(None)
    hidden, weight = problem.hidden[rows].float().requires_grad_(), problem.weight[rank * 19 : rank * 19 + 19].float()
    with validation("never"), recorded() as forward:
        stats = linear_token_stats(
            hidden, weight, problem.targets, group=dist.group.WORLD, sequence_parallel=scatter, vocab_size=V, mode=mode,
            budget=1 << 22, objective=problem.objective,
        )  # fmt: skip
    assert stats.loss is not None
    with recorded() as backward:
        stats.loss.backward()
    return forward, backward


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_collectives_of_a_chunk(mode: LinearMode, scatter: bool) -> None:
    """One all-gather of the statistics; one sum of the hidden states' gradient; with split hidden states one gather a pass."""
    gather, reduce = "_allgather_base_", "_reduce_scatter_base_" if scatter else "allreduce_"
    for forward, backward in run_world(2, collectives, mode, scatter):
        names = [name.split()[0] for name in forward], [name.split()[0] for name in backward]
        if mode == "in_forward":
            assert names == ([gather] * (1 + scatter) + [reduce], [])
        else:
            assert names == ([gather] * (1 + scatter), [gather] * scatter + [reduce])


def disagreeing(rank: int, fault: str) -> str:
    problem = make(torch.float32, ignored=False)
    hidden, weight = problem.hidden.float(), problem.weight[:19].float()
    budget = 10 if fault == "budget" and rank == 1 else 1 << 20
    if fault == "weight" and rank == 1:
        weight = weight[:, :-1]
    if fault == "rows" and rank == 1:
        hidden = hidden[:-1]
    with pytest.raises(ValueError) as caught:
        linear_token_stats(
            hidden, weight, problem.targets[: len(hidden)], group=dist.group.WORLD, vocab_size=V, budget=budget
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("budget", "too small for one row"), ("weight", "calls for"), ("rows", "the number of hidden rows")],
)
def test_a_fault_on_one_rank_is_raised_on_all(fault: str, message: str) -> None:
    for text in run_world(2, disagreeing, fault):
        assert message in text


def half_forbidden(rank: int, mode: LinearMode, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """All columns of rank 1 have a logit of −inf; against rank 0's columns alone."""
    problem, found = make(dtype, ignored=False), []
    targets = problem.targets % 19
    for group, columns in ((dist.group.WORLD, slice(rank * 19, rank * 19 + 19)), (None, slice(0, 19))):
        hidden, weight, bias = (
            x.to(dtype).requires_grad_() for x in (problem.hidden, *(x[columns] for x in problem[1:3]))
        )
        shown = bias if columns.start == 0 else torch.full_like(bias, -torch.inf)
        stats = linear_token_stats(
            hidden, weight, targets, bias=shown, group=group, vocab_size=V if group else 19, mode=mode, budget=20000
        )  # fmt: skip
        problem.objective(stats).backward()
        assert hidden.grad is not None and weight.grad is not None
        found.append([stats.logprobs.detach(), hidden.grad, weight.grad])
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["resident", "recompute"])
def test_a_shard_without_an_allowed_column(mode: LinearMode, dtype: torch.dtype) -> None:
    for rank, (got, want) in enumerate(run_world(2, half_forbidden, mode, dtype)):
        assert torch.isfinite(torch.cat([x.float().flatten() for x in got])).all()
        for mine, alone in zip(got[:2], want[:2], strict=True):
            assert error(mine, alone) < (1e-5 if dtype == torch.float32 else 5e-3)
        assert not got[2].any() if rank else error(got[2], want[2]) < (1e-5 if dtype == torch.float32 else 5e-3)
