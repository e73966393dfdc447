"""Logits of the vocabulary benchmarks: the same on every rank, each with its columns; their float64 truth; gathering them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

_BLOCK = 128  # rows of a float64 reference block


class Case(NamedTuple):
    """One rank's input: logits [T, V/tp] (never overwritten), targets [T] and upstream gradients [T]."""

    logits: Tensor
    targets: Tensor
    upstream: Tensor  # of the log-probs
    upstream_entropy: Tensor
    start: int  # the first column's token id
    lse: Tensor  # [T] float64
    logprobs: Tensor  # [T] float64
    entropy: Tensor  # [T] float64


def make_case(rank: int, tokens: int, vocab: int, tp: int, dtype: torch.dtype) -> Case:
    """Make the same [T, V] logits on every rank, of which each keeps its columns; float64 references by blocks of rows."""
    generator = torch.Generator().manual_seed(0)
    width = vocab // tp
    start = rank * width
    logits = torch.empty(tokens, width, dtype=dtype)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    upstream, upstream_entropy = torch.randn(2, tokens, generator=generator) / tokens
    references = []
    for rows in torch.arange(tokens).split(_BLOCK):
        block = (3 * torch.randn(len(rows), vocab, generator=generator)).to(dtype)
        logits[rows] = block[:, start : start + width]
        log_p = torch.log_softmax(block.double(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        lse = block[:, :1].double()[:, 0] - log_p[:, 0]
        references.append(torch.stack([lse, log_p.gather(1, targets[rows, None])[:, 0], entropy]))
    lse, logprobs, entropy = torch.cat(references, 1)
    return Case(logits, targets, upstream, upstream_entropy, start, lse, logprobs, entropy)


def reference_gradient(case: Case, entropy: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, their float64 gradient): g·(1[y] − p), and for the entropy −h·p·(log p + H)."""
    width = case.logits.shape[1]
    for rows in torch.arange(len(case.targets)).split(_BLOCK):
        log_p = case.logits[rows].double() - case.lse[rows, None]
        p, g = log_p.exp(), case.upstream[rows, None].double()
        here = torch.arange(case.start, case.start + width) == case.targets[rows, None]
        dz = g * (here.double() - p)
        if entropy:
            dz -= case.upstream_entropy[rows, None].double() * p * (log_p + case.entropy[rows, None])
        yield rows, dz


class Gather(torch.autograd.Function):
    """[T, V/tp] to [T, V]; the loss is the same on all ranks, so each keeps its columns of the gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor) -> Tensor:
        shards = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, logits)
        return torch.cat(shards, 1)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
