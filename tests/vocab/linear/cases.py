"""Inputs of the fused head and their dense float64 truth."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl import TokenStats

N, D, V = 30, 12, 37


class Problem(NamedTuple):
    """Rounded operands as float64, targets on every shard with some ignored, and weights of the three statistics."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    upstream: list[Tensor]

    @property
    def keep(self) -> Tensor:
        return self.targets != -100

    def objective(self, stats: TokenStats) -> Tensor:
        """Not linear in the log-prob, so that its gradient needs the statistics."""
        a, b, c = (g.to(stats.logprobs.dtype) for g in self.upstream)
        total = (a * stats.logprobs.exp()).sum() + (c * stats.lse).sum()
        return total if stats.entropy is None else total + (b * stats.entropy).sum()


class Truth(NamedTuple):
    stats: TokenStats
    loss: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]


def make(dtype: torch.dtype = torch.float64, shift: float = 0.0, seed: int = 0, ignored: bool = True) -> Problem:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=g, dtype=torch.float64)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64) * 0.6
    bias = torch.randn(V, generator=g, dtype=torch.float64) + shift
    targets = torch.randint(0, V - 4, (N,), generator=g)
    targets[:4] = torch.tensor([0, V // 2, V - 5, 9])
    if ignored:
        targets[torch.arange(N) % 3 == 1] = -100
    upstream = [torch.randn(N, generator=g, dtype=torch.float64) for _ in range(3)]
    rounded = (x.to(dtype).double() for x in (hidden, weight, bias))
    return Problem(*rounded, targets, upstream)


def dense(
    problem: Problem,
    *,
    size: int = V,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Truth:
    """Whole logits, in `dtype`; ignored rows never touched."""
    operands = [
        x.detach().to(dtype, copy=True).requires_grad_() for x in (problem.hidden, problem.weight, problem.bias)
    ]
    keep = problem.keep
    z = logit_scale * (operands[0][keep] @ operands[1].T + operands[2])[:, :size]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    t = temperature[keep, None] if isinstance(temperature, Tensor) else temperature
    log_p = torch.log_softmax(z / t, -1)

    def whole(x: Tensor) -> Tensor:
        return torch.zeros(len(problem.targets), dtype=dtype).masked_scatter(keep, x)

    stats = TokenStats(
        whole(log_p.gather(1, problem.targets[keep, None])[:, 0]),
        whole(-(log_p.exp() * log_p).sum(1)),
        whole(torch.logsumexp(z / t, 1)),
    )
    masked = [torch.where(keep, g, 0) for g in problem.upstream]
    loss = problem._replace(upstream=masked).objective(stats)
    loss.backward()
    return Truth(TokenStats(*(x.detach() for x in stats[:3])), loss.detach(), tuple(x.grad for x in operands))  # type: ignore[arg-type, union-attr]


def error(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None and want is not None
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
