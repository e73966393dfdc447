"""Methods of `benchmarks.token_stats_gpu` and their input: ours, one shard of it alone, and the peers' cross-entropies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.peers import PLAIN, CrossEntropy, peers
from parallel_rl import token_stats
from parallel_rl.vocab.backends.choice import Backend
from parallel_rl.vocab.backends.passes import RowSpec, combine_rows, row_gradient, row_parts

OURS, ENTROPY, SHARD = "ours, in place", "ours + entropy, in place", "ours + entropy, a shard of TP 8"
RANKS = 8


class Case(NamedTuple):
    """[T, V] logits (never overwritten), [T] targets and upstream gradients of log-prob and entropy."""

    logits: Tensor
    targets: Tensor
    upstream: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Method:
    """`start(work, case)` gives (forward, backward); backward takes what forward gave and returns the gradient."""

    name: str
    start: Callable[[Tensor, Case], tuple[Callable[[], tuple[Tensor, ...]], Callable[[tuple[Tensor, ...]], Tensor]]]
    kind: str  # "ours" or "peer"
    bfloat16_gradient: bool = False  # it rounds the gradient to bfloat16 whatever the logits' dtype
    bfloat16_logprobs: bool = False  # where logits are bfloat16, its log-probs are too


def _with_autograd(
    work: Tensor, case: Case, call: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> tuple[Callable[[], tuple[Tensor, ...]], Callable[[tuple[Tensor, ...]], Tensor]]:
    z = work.detach().requires_grad_()

    def backward(outputs: tuple[Tensor, ...]) -> Tensor:
        gradients = [g.to(x.dtype) for x, g in zip(outputs, case.upstream, strict=False)]
        return torch.autograd.grad(outputs, z, gradients)[0]

    return lambda: call(z, case.targets), backward


def _ours(z: Tensor, targets: Tensor, entropy: bool, backend: Backend) -> tuple[Tensor, ...]:
    stats = token_stats(z, targets, entropy=entropy, consume_logits=True, backend=backend)
    return (stats.logprobs,) if stats.entropy is None else (stats.logprobs, stats.entropy)


def _of_peer(z: Tensor, targets: Tensor, loss: CrossEntropy) -> tuple[Tensor, ...]:
    return (-loss(z, targets),)


def _shard(
    work: Tensor, case: Case, backend: Backend
) -> tuple[Callable[[], tuple[Tensor, ...]], Callable[[tuple[Tensor, ...]], Tensor]]:
    """The passes of one shard; the other ranks' parts are copies of its own, in place of the all-gather."""
    keep = torch.ones_like(case.targets, dtype=torch.bool)
    inv_t = torch.ones(1, 1, device=work.device)
    spec = RowSpec(case.targets, keep, inv_t, 0, work.shape[1])
    parts = torch.empty(RANKS, work.shape[0], 4, device=work.device)

    def forward() -> tuple[Tensor, ...]:
        parts.copy_(row_parts(work, spec, True, backend))
        logprobs, entropy, _, _, rows = combine_rows(parts, spec, backend)
        assert entropy is not None
        return logprobs, entropy, rows

    def backward(outputs: tuple[Tensor, ...]) -> Tensor:
        return row_gradient(work, spec, outputs[2], (*case.upstream, None), work, backend)

    return forward, backward


def methods(device: str, backend: Backend) -> list[Method]:
    """Ours, and the peers that are installed; on a CPU, where this module is only tried, plain torch alone."""
    found = ours(backend)
    for p in peers(device):
        if device == "cuda" or p.name == PLAIN:
            call = partial(_with_autograd, call=partial(_of_peer, loss=p.loss))
            found.append(Method(p.name, call, "peer", p.bfloat16_gradient, p.bfloat16_loss))
    return found


def ours(backend: Backend) -> list[Method]:
    """Without entropy and with it; no peer is imported."""
    return [
        Method(name, partial(_with_autograd, call=partial(_ours, entropy=entropy, backend=backend)), "ours")
        for name, entropy in ((OURS, False), (ENTROPY, True))
    ]


def shard(backend: Backend) -> Method:
    """The passes of one shard, of a case with its columns only."""
    return Method(SHARD, partial(_shard, backend=backend), "ours")


def make_case(tokens: int, vocab: int, dtype: torch.dtype, device: str) -> Case:
    g = torch.Generator(device).manual_seed(0)
    logits = torch.empty(tokens, vocab, dtype=dtype, device=device)
    for rows in logits.split(512):
        rows.copy_(3 * torch.randn(rows.shape, generator=g, device=device))
    targets = torch.randint(vocab, (tokens,), generator=g, device=device)
    first, second = torch.randn(2, tokens, generator=g, device=device) / tokens
    return Case(logits, targets, (first, second))
