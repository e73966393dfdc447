"""The fused head on a card: against dense float64, without a host sync, and within its budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from parallel_rl import linear_token_stats
from parallel_rl.validation import validation
from parallel_rl.vocab.linear.plan import LinearMode
from tests.card import no_sync
from tests.vocab.linear.cases import error

pytestmark = pytest.mark.gpu
MODES: tuple[LinearMode, ...] = ("in_forward", "resident", "recompute", "auto")
N, D, V = 700, 256, 5000


def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(N, D, generator=g, device="cuda").to(dtype)
    weight = (torch.randn(V, D, generator=g, device="cuda") / 8).to(dtype)
    targets = torch.randint(V, (N,), generator=g, device="cuda")
    targets[::5] = -100
    return hidden, weight, targets, torch.randn(N, generator=g, device="cuda")


def step(
    operands: tuple[Tensor, Tensor], targets: Tensor, upstream: Tensor, mode: LinearMode, **options: int | float | None
) -> list[Tensor]:
    hidden, weight = (x.detach().requires_grad_() for x in operands)
    stats = linear_token_stats(
        hidden, weight, targets, temperature=0.8, softcap=20.0, mode=mode,
        objective=lambda s: (upstream * (s.logprobs + 0.1 * s.entropy)).sum(), **options,  # type: ignore[arg-type, operator]
    )  # fmt: skip
    assert stats.loss is not None
    (stats.loss * 256).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [stats.logprobs, hidden.grad / 256, weight.grad / 256]


def truth(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> list[Tensor]:
    h, w = (x.detach().to(torch.float64, copy=True).requires_grad_() for x in (hidden, weight))
    keep = targets != -100
    log_p = torch.log_softmax(20 * torch.tanh(h @ w.T / 20) / 0.8, -1)
    logprobs = torch.where(keep, log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0], 0)
    entropy = torch.where(keep, -(log_p.exp() * log_p).sum(1), 0)
    (upstream.double() * (logprobs + 0.1 * entropy)).sum().backward()
    assert h.grad is not None and w.grad is not None
    return [logprobs.detach(), h.grad, w.grad]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_dense_float64(dtype: torch.dtype, mode: LinearMode) -> None:
    if (mode, dtype) == ("in_forward", torch.float16):
        pytest.skip("refused")
    case = make(dtype)
    allowed = {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, 1e-2)
    statistics = {torch.float64: 1e-11}.get(dtype, 1e-5)
    for rows in (None, N - N // 5):
        got = step(case[:2], *case[2:], mode, budget=1 << 24, rows=rows)
        for value, want, limit in zip(got, truth(*case), (statistics, allowed, allowed), strict=True):
            assert error(value, want) < limit


@pytest.mark.parametrize("mode", MODES)
def test_the_host_never_waits(mode: LinearMode) -> None:
    case = make(torch.bfloat16)
    step(case[:2], *case[2:], mode, budget=1 << 24, rows=N)
    with validation("never"), no_sync():
        step(case[:2], *case[2:], mode, budget=1 << 24, rows=N)


@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_extra_memory_stays_within_the_budget(mode: LinearMode) -> None:
    g = torch.Generator(device="cuda").manual_seed(0)
    tokens, columns, size, budget = 4096, 65536, 1024, 1 << 27
    hidden = torch.randn(tokens, size, generator=g, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, size, generator=g, device="cuda", dtype=torch.bfloat16) / 16
    targets, upstream = torch.randint(columns, (tokens,), device="cuda"), torch.randn(tokens, device="cuda")
    step((hidden, weight), targets, upstream, mode, budget=budget)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step((hidden, weight), targets, upstream, mode, budget=budget)
    gradients = 4 * weight.numel() + 2 * hidden.numel()  # the weight's is summed up in float32
    assert torch.cuda.max_memory_allocated() - before - gradients - 2 * weight.numel() <= 1.5 * budget


def test_the_weight_gradient_goes_straight_to_main_grad() -> None:
    hidden, weight, targets, upstream = make(torch.bfloat16)
    want = truth(hidden, weight, targets, upstream)[2]
    for mode in MODES:
        weight = weight.detach().requires_grad_()
        weight.main_grad = torch.zeros(weight.shape, device="cuda")  # type: ignore[attr-defined]
        stats = linear_token_stats(
            hidden, weight, targets, temperature=0.8, softcap=20.0, mode=mode, main_grad_factor=1.0, budget=1 << 24,
            objective=lambda s: (upstream * (s.logprobs + 0.1 * s.entropy)).sum(),  # type: ignore[operator]
        )  # fmt: skip
        assert stats.loss is not None
        stats.loss.backward()
        assert error(weight.main_grad, want) < 1e-2  # type: ignore[attr-defined]
