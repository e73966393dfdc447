"""What the fused head has for itself: logits kept in half the bytes, rows that are multiplied together, a scaled gradient."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import TokenStats, linear_token_stats
from parallel_rl.vocab.backends.choice import PER_TOP
from parallel_rl.vocab.backends.passes import HalfLogits, RowSpec, combine_rows, row_gradient, row_parts, row_stats
from parallel_rl.vocab.backends.triton import operators
from parallel_rl.vocab.backends.triton.operators import scale_
from parallel_rl.vocab.linear.plan import HeadShape, make_plan
from tests.vocab.triton_cases.common import DEVICE, error, logits_and_targets, upstream
from tests.vocab.triton_cases.ranks import over_ranks

LIMIT = 5e-4  # of float16 distances: where one is large its probability is small


def half_of(rows: int, columns: int, width: int | None = None) -> HalfLogits:
    values = torch.full((rows, width or columns), torch.nan, dtype=torch.float16, device=DEVICE)[:, :columns]
    return HalfLogits(values, torch.full((rows, -(-columns // PER_TOP)), torch.nan, device=DEVICE))


@pytest.mark.parametrize(("columns", "processors"), [(37, 0), (128, 0), (300, 0), (9005, 0), (9005, 2)])
@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_logits_are_kept_as_they_are_read(
    columns: int, processors: int, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics have the bits that they have without; a block's largest logit is exact, the others are near it."""
    monkeypatch.setattr(operators, "processors", lambda device: processors)
    logits, targets = logits_and_targets(4, columns, torch.float32, shift)
    logits[0, : columns // 2] = -torch.inf  # a policy that is truncated, whole blocks among it
    keep = torch.arange(4, device=DEVICE) != 2
    spec = RowSpec(targets, keep, torch.linspace(0.5, 2, 4, device=DEVICE)[:, None], 0, columns)
    half = half_of(4, columns)
    assert torch.equal(
        row_parts(logits, spec, True, "triton", True, half), row_parts(logits, spec, True, "triton", True)
    )
    for block in range(half.tops.shape[1]):
        part = slice(block * PER_TOP, (block + 1) * PER_TOP)
        top = logits[keep, part].amax(1)
        assert torch.equal(half.tops[keep, block], torch.where(top.isinf(), 0, top))
    tops = half.tops.repeat_interleave(PER_TOP, 1)[:, :columns]
    assert torch.equal(half.values[keep], (logits - tops).to(torch.float16)[keep])
    assert half.values[2].isnan().all() and half.tops[2].isnan().all(), "a row that is not kept is not read"

    alone = half_of(4, columns, columns + 7)  # rows at another stride, of which few start at 16 bytes
    made = row_stats(logits, spec, True, "triton", False, alone)
    assert torch.equal(alone.values[keep], half.values[keep])
    exact = row_gradient(logits.double(), spec, made[4].double(), upstream(4), None, "eager")
    over = half.values.view(torch.bfloat16)
    got = row_gradient(half.values, spec, made[4], upstream(4), over, "triton", half.tops)
    assert got.data_ptr() == half.values.data_ptr() and not got[2].any()
    assert error(got, exact) <= error(exact.to(torch.bfloat16), exact) + LIMIT


@pytest.mark.parametrize("entropy", [False, True])
def test_opcheck(entropy: bool) -> None:
    logits, targets = logits_and_targets(3, 300, torch.float32)
    keep, inv_t = torch.ones(3, dtype=torch.bool, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    values, tops = (x.nan_to_num() for x in half_of(3, 300))
    inputs = (logits, targets, keep, inv_t, 0, 300, entropy, False, values, tops)
    torch.library.opcheck(operators.vocab_stats_half, inputs)
    torch.library.opcheck(operators.vocab_row_stats_half, inputs)
    spec = RowSpec(targets, keep, inv_t, 0, 300)
    rows = combine_rows(row_parts(logits, spec, True, "triton", half=HalfLogits(values, tops))[None], spec, "triton")[4]
    out = torch.empty_like(values, dtype=torch.bfloat16)
    torch.library.opcheck(
        operators.vocab_gradient_to, (values, targets, keep, inv_t, rows, *upstream(3), 0, 300, out, tops)
    )
    torch.library.opcheck(
        scale_, (torch.ones(3, 5, dtype=torch.bfloat16, device=DEVICE), torch.tensor(0.3, device=DEVICE))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 1500), (0, 4)])
def test_scale(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """By a factor that is not rounded to the dtype of the gradient, which would make all of it wrong alike."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    for factor in (1.0, 1 / 3):
        got, scale = values.clone(), torch.tensor(factor, device=DEVICE)
        scale_(got, scale)
        assert torch.equal(got, (values.float() * scale).to(dtype))


N, D, V = 16, 8, 600
BUDGETS = (8500, 18000, 1 << 16, 6500)  # groups of kept chunks; one of all rows; one chunk; a row or two


@cache
def problem(whole: bool, rows: int = N, vocab: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden [N, D], weight [V, D], targets [N], weights of the tokens' statistics [3, N]); not whole: some are ignored."""
    g = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(rows, D, generator=g), torch.randn(vocab, D, generator=g) * 0.8
    targets = torch.randint(0, vocab, (rows,), generator=g)
    weights = torch.randn(3, rows, generator=g)
    if not whole:
        targets[torch.arange(rows) % 5 == 3] = -100
        weights[:, targets == -100] = 0
    return hidden.bfloat16(), weight.bfloat16(), targets, weights


def objective(stats: TokenStats, weights: Tensor) -> Tensor:
    assert stats.entropy is not None
    a, b, c = weights.to(stats.logprobs)
    return (a * stats.logprobs.exp()).sum() + (b * stats.entropy).sum() + (c * stats.lse).sum()


def whole_gradients(factor: float, whole: bool) -> tuple[Tensor, Tensor]:
    hidden, weight, targets, weights = problem(whole)
    h, w = (x.double().requires_grad_() for x in (hidden, weight))
    log_p = ((h @ w.t()) / 0.7).log_softmax(1)
    lse = ((h @ w.t()) / 0.7).logsumexp(1)
    stats = TokenStats(log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0], -(log_p.exp() * log_p).sum(1), lse)
    (factor * objective(stats, weights)).backward()
    assert h.grad is not None and w.grad is not None
    return h.grad, w.grad


def head_case(
    rank: int, size: int, scatter: bool, budget: int, factor: float, main_grad: bool, rows: int = N, vocab: int = V
) -> tuple[Tensor, Tensor]:
    """(gradient of this rank's hidden rows, of its rows of the weight); with main_grad every row carries loss."""
    hidden, weight, targets, weights = problem(main_grad, rows, vocab)
    hidden = hidden.masked_fill((targets == -100)[:, None], torch.nan)
    part, columns = (slice(rank * n // size, (rank + 1) * n // size) for n in (rows, vocab))
    h = hidden[part if scatter else slice(None)].to(DEVICE).requires_grad_()
    w = weight[columns].to(DEVICE).requires_grad_()
    if main_grad:
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)  # type: ignore[attr-defined]
    stats = linear_token_stats(
        h, w, targets.to(DEVICE), temperature=0.7, group=dist.group.WORLD if size > 1 else None, sequence_parallel=scatter,
        vocab_size=vocab, mode="in_forward", budget=budget, backend="triton", main_grad_factor=1.0 if main_grad else None,
        objective=lambda stats: objective(stats, weights.to(DEVICE)),
    )  # fmt: skip
    assert stats.loss is not None
    (stats.loss * factor).backward()
    assert h.grad is not None and w.grad is not None
    return h.grad.cpu(), (w.main_grad if main_grad else w.grad).cpu()  # type: ignore[attr-defined]


def cases() -> list[tuple[bool, int, bool]]:
    """(sequence parallel, budget, main_grad): each budget, and each pair of the two switches."""
    return [
        (scatter, b, grad) for b, (scatter, grad) in zip(BUDGETS, product((True, False), (True, False)), strict=True)
    ]


def head_cases(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    return [head_case(rank, size, scatter, budget, 1 / 3, main_grad) for scatter, budget, main_grad in cases()]


def test_rows_are_multiplied_together() -> None:
    """On two ranks, in groups and all at once; the factor 1/3, which bfloat16 lacks, is that of float32; one: kernels.py."""
    meta, size = torch.device("meta"), 2
    shape = HeadShape(N, D, V // size, torch.bfloat16, meta, size > 1, in_place=True, spared=2 * D * V // size)
    plans = [make_plan(shape, "in_forward", b) for b in BUDGETS]
    assert plans[0].size < plans[0].group < N and plans[1].size < N <= plans[1].group and plans[2].size == N, plans
    per_rank = over_ranks(size, head_cases, size)
    truths = [whole_gradients(1 / 3, whole) for whole in (False, True)]
    for case, found in zip(cases(), zip(*per_rank, strict=True), strict=True):
        truth = truths[case[2]]
        rounding = [error(x.bfloat16(), x) for x in truth]
        of_hidden = torch.cat([h for h, _ in found]) if case[0] else found[0][0]
        of_weight = torch.cat([w for _, w in found])
        assert all(torch.equal(h, found[0][0]) for h, _ in found) or case[0]
        assert error(of_hidden, truth[0]) <= 2 * rounding[0] + LIMIT, case
        # of rounded gradients of the logits, rounded as a sum, and once more where it waited in bfloat16
        assert error(of_weight, truth[1]) <= 2.5 * rounding[1] + LIMIT, case


def test_a_scale_of_the_loss_is_not_rounded() -> None:
    """The factor's rounding to bfloat16 makes a gradient too large or small as a whole: 1/3 by 0.2 %."""
    once, third = (head_case(0, 1, False, 1 << 17, factor, False, 40, 1200) for factor in (1.0, 1 / 3))
    for a, b in zip(once, third, strict=True):
        ratio = (a.double() * b.double()).sum() / (a.double() ** 2).sum()
        assert abs(3 * ratio - 1) < 4e-4
