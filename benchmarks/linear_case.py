"""One input of the LM head's benchmark: the same on every rank, each with its rows of the weight, and its float64 truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.losses_case import GRPO_FIELDS, grpo_terms


class Part(NamedTuple):
    """This rank of those that share the head: each has its rows of the weight, under sequence parallelism its tokens too."""

    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False

    @property
    def group(self) -> ProcessGroup | None:
        return dist.group.WORLD if self.size > 1 else None

    def tokens(self, of: Tensor) -> Tensor:
        return of.chunk(self.size)[self.rank] if self.sequence_parallel else of

    def words(self, of: Tensor, dim: int = 0) -> Tensor:
        return of.chunk(self.size, dim)[self.rank]


class Shape(NamedTuple):
    """Sizes of the whole problem."""

    tokens: int
    vocab: int
    hidden: int


class Layout(NamedTuple):
    """Number of ranks that share the head, and whether each has its tokens only."""

    tp: int = 1
    sequence_parallel: bool = False

    def part(self, rank: int) -> Part:
        return Part(rank, self.tp, self.sequence_parallel and self.tp > 1)


class Case(NamedTuple):
    """hidden [T, D] or its part, weight [V/tp, D], targets [T], the weight of each token's log-prob [T]; as a batch, too.

    data: [1, T] fields of these tokens as one sequence, token-aligned: row t predicts column t + 1, and the last row carries
        no loss.
    truths: what a method is checked against.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    upstream: Tensor
    data: dict[str, Tensor]
    truths: dict[Objective, Truth]
    part: Part


class Truth(NamedTuple):
    """float64: the loss, its scale (it may be near 0 itself) and the gradients of what this rank holds."""

    loss: Tensor
    scale: Tensor
    of_hidden: Tensor
    of_weight: Tensor


Objective = Callable[[Tensor, Case], Tensor]  # of the log-probs [T]


def weighted(logprobs: Tensor, case: Case) -> Tensor:
    """−Σ upstream · log-prob."""
    return -(case.upstream * logprobs).sum()


def grpo(logprobs: Tensor, case: Case) -> Tensor:
    """The whole GRPO loss as one would write it, of the rows that predict a token."""
    return grpo_terms(logprobs[:-1], *(case.data[field][0, 1:] for field in GRPO_FIELDS)).mean()


def make_case(shape: Shape, dtype: torch.dtype, device: str, part: Part | None = None, truths: bool = True) -> Case:
    """Make one case, the same on every call; `truths` are needed to check a method, and take longer than one."""
    part = Part() if part is None else part
    tokens, vocab, size = shape
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=g).to(dtype)
    weight = (torch.randn(vocab, size, generator=g) * 2 / size**0.5).to(dtype)
    targets, upstream = torch.randint(vocab, (tokens,), generator=g), torch.randn(tokens, generator=g) / tokens
    hidden, weight, targets, upstream = (x.to(device) for x in (hidden, weight, targets, upstream))
    whole = weight.double()
    logprobs = torch.cat([_log_softmax(h, whole).gather(1, y[:, None])[:, 0] for h, y in _blocks(hidden, targets)])
    noise = 0.1 * torch.randn(3, tokens, generator=g).to(device)
    fields = [tokens * upstream, *(logprobs + noise).float()]
    data = {
        "input_ids": targets,
        **dict(zip((*GRPO_FIELDS, "generation_logprobs"), fields, strict=True)),
    }
    data = {name: field.roll(1)[None] for name, field in data.items()}
    data |= {"token_mask": torch.ones_like(data["input_ids"]), "sample_mask": torch.ones(1, device=device)}
    case = Case(hidden, weight, targets, upstream, data, {}, part)
    if truths:
        case.truths.update({objective: _truth(objective, logprobs, case) for objective in (weighted, grpo)})
    return case._replace(hidden=part.tokens(hidden).clone(), weight=part.words(weight).clone())


def _truth(objective: Objective, logprobs: Tensor, case: Case) -> Truth:
    """Truth from whole operands; what another rank holds is left out."""
    logprobs = logprobs.requires_grad_()
    loss = objective(logprobs, case)
    (slope,) = torch.autograd.grad(loss, logprobs)
    whole = case.weight.double()
    of_hidden, of_weight = [], torch.zeros_like(case.part.words(whole))
    for h, y, g in _blocks(case.hidden, case.targets, slope[:, None]):
        dz = (-_log_softmax(h, whole).exp() * g).scatter_add(1, y[:, None], g)
        of_hidden.append(dz @ whole)
        of_weight += case.part.words(dz, 1).T @ h.double()
    scale = slope.norm() * len(slope) ** 0.5
    return Truth(loss.detach(), scale, case.part.tokens(torch.cat(of_hidden)), of_weight)


def _log_softmax(hidden: Tensor, whole: Tensor) -> Tensor:
    return torch.log_softmax(hidden.double() @ whole.T, -1)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(256) for x in tensors), strict=True)
