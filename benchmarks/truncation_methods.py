"""Methods of `benchmarks.truncation`: ours, the two ways that bring rows together and sort them; and ways to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from benchmarks.truncation_case import BLOCK, Case, kept_words
from benchmarks.vocab_case import Gather
from parallel_rl.vocab.sampling import sample_tokens
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.topk import top_columns
from parallel_rl.vocab.truncated_stats import truncated_token_stats

OURS = "ours, in place"


@dataclass(frozen=True)
class Method:
    """`run(logits, targets, **rule)` gives log-probs, −inf where the target was dropped."""

    name: str
    run: Callable[..., Tensor]
    kind: str  # "ours" or "peer"


class _Exchange(torch.autograd.Function):
    """[T, V/tp] to [T/tp, V]: each rank gets whole rows of its part of the tokens; the way back for gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor) -> Tensor:
        size = dist.get_world_size()
        parts = torch.empty_like(logits)
        dist.all_to_all_single(parts, logits.contiguous())
        return parts.view(size, -1, logits.shape[1]).transpose(0, 1).reshape(-1, size * logits.shape[1])

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        size = dist.get_world_size()
        parts = gradient.view(len(gradient), size, -1).transpose(0, 1).contiguous()
        back = torch.empty_like(parts)
        dist.all_to_all_single(back, parts)
        return back.view(-1, parts.shape[-1])


class _Rows(torch.autograd.Function):
    """[T/tp] of each rank to [T]."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def _sorted(whole: Tensor, targets: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    z = whole.float()
    with torch.no_grad():
        keep = torch.cat([kept_words(rows, top_k, top_p) for rows in z.split(BLOCK)])
    return torch.log_softmax(z.masked_fill(~keep, -torch.inf), -1).gather(1, targets[:, None])[:, 0]


def _gathered(logits: Tensor, targets: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    return _sorted(Gather.apply(logits), targets, top_k, top_p)


def _exchanged(logits: Tensor, targets: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    mine = targets.chunk(dist.get_world_size())[dist.get_rank()]
    found: Tensor = _Rows.apply(_sorted(_Exchange.apply(logits), mine, top_k, top_p))
    return found


def _ours(
    logits: Tensor, targets: Tensor, consume: bool, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    return truncated_token_stats(
        logits, targets, top_k=top_k, top_p=top_p, group=dist.group.WORLD, entropy=False, consume_logits=consume
    ).logprobs


METHODS = (
    Method(OURS, partial(_ours, consume=True), "ours"),
    Method("ours, new gradient", partial(_ours, consume=False), "information"),
    Method("exchange, then sort", _exchanged, "peer"),
    Method("gather, then sort", _gathered, "peer"),
)


def make_draws(case: Case) -> dict[str, Callable[[], object]]:
    """Draws from shards that are not gathered, beside the way that gathers."""
    group, width = dist.group.WORLD, case.logits.shape[1]
    shard = VocabShard.of(width, group)

    def gathered_draw() -> Tensor:
        z = Gather.apply(case.logits).float()
        return torch.multinomial(z.masked_fill(~kept_words(z, None, 0.95), -torch.inf).softmax(-1), 1)

    return {
        "draw, top-p 0.95: ours": lambda: sample_tokens(case.logits, case.keys, top_p=0.95, group=group),
        "draw, top-p 0.95: gather, sort, multinomial": gathered_draw,
        "draw: ours": lambda: sample_tokens(case.logits, case.keys, group=group),
        "draw: gather, multinomial": lambda: torch.multinomial(Gather.apply(case.logits).float().softmax(-1), 1),
        "50 largest, with ids: ours": lambda: top_columns(case.logits, 50, shard),
        "50 largest, with ids: gather, topk": lambda: Gather.apply(case.logits).topk(50, dim=1),
    }
