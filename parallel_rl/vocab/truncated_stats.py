"""Token statistics of a truncated policy, from vocabulary shards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import raise_on_all_ranks, shape_facts
from parallel_rl.validation import checks_values
from parallel_rl.vocab.consumed import mark_consumed, saved_logits
from parallel_rl.vocab.shards import KEEP_ALL, Truncation, VocabShard, check_spans
from parallel_rl.vocab.stats import IGNORE_INDEX, TokenStats, check_logits, check_tokens, stats_of_shard
from parallel_rl.vocab.threshold import kept_floor
from parallel_rl.vocab.topk import check_columns

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.backends.choice import Backend


def truncated_token_stats(
    logits: Tensor,
    targets: Tensor,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    kept_ids: Tensor | None = None,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = IGNORE_INDEX,
    entropy: bool = True,
    sum_pi_squared: bool = False,
    consume_logits: bool = False,
    backend: Backend = "auto",
) -> TokenStats:
    """Compute `token_stats` of softmax(z / temperature) cut by top-k, then top-p, or a recorded set.

        log p_y = z_y/T − lse       lse = log Σ_{v kept} e^{z_v/T}       −inf where y is not kept

    Ties with the last kept logit, and the largest logit, always stay. The threshold needs no sorting or gathering, only small
    all-reduces of [tokens, 8] integers (6 for 16-bit logits, 11 for float32), and is the same for every split. Top-p reads
    the logits twice for it; top-k alone, and a card without Triton, read them for each all-reduce. A card copies up to a
    thirty-second of the logits, with top-k twice that. Gradients pass through the kept logits; the kept set is a constant.

    >>> truncated_token_stats(torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2), torch.tensor([3, 0]), top_k=2).logprobs
    tensor([-0.3133,    -inf])

    Args:
        logits, targets, group, vocab_size, vocab_start, temperature, ignore_index, entropy, sum_pi_squared, consume_logits,
            backend: as for `token_stats`. Without consume_logits the logits are copied once; with it they hold −inf where a
            token was dropped, until the backward writes the gradient.
        top_k, top_p: see `Truncation`.
        kept_ids: [..., K] instead of the rules: each token's recorded kept set, distinct global ids, padded with −1. The
            target counts as kept.

    Returns:
        `TokenStats`; a target that is not kept has log-prob −inf with gradient 0; its entropy and lse are of the kept set.

    Raises:
        ValueError: errors of `token_stats`; k outside [1, V], p outside (0, 1], no rule, or top_k or top_p with `kept_ids`.

    Nucleus sampling: Holtzman et al., "The curious case of neural text degeneration", arXiv 1904.09751.
    """

    def check() -> VocabShard:
        check_logits(logits, consume_logits, backend)
        truncation = Truncation(top_k, top_p, kept_ids is not None)
        if not truncation:
            raise ValueError("give top_k, top_p or kept_ids; without any of them call token_stats")
        shard = VocabShard.of(
            logits.shape[-1], group, vocab_size, vocab_start, temperature=temperature, entropy=entropy,
            truncation=truncation, consume_logits=consume_logits, backend=backend, sum_pi_squared=sum_pi_squared,
        )  # fmt: skip
        check_tokens(targets, logits.shape[:-1], shard, ignore_index)
        if kept_ids is not None:
            check_kept_ids(kept_ids, targets != ignore_index, shard.vocab_size)
        return shard

    shard = raise_on_all_ranks(check, [group], logits, shape_facts(logits, vocab_size, vocab_start))
    check_spans(group, logits.shape[-1], vocab_size, vocab_start, logits)
    return truncated_stats_of_shard(logits, targets, targets != ignore_index, shard, kept_ids)


def check_kept_ids(kept_ids: Tensor, valid: Tensor, vocab_size: int) -> None:
    """Raise ValueError for kept sets [..., K] of a wrong shape, with a wrong id, or an id twice."""
    if kept_ids.dim() != valid.dim() + 1 or kept_ids.shape[:-1] != valid.shape or kept_ids.shape[-1] < 1:
        raise ValueError(f"kept_ids must be [{', '.join(map(str, valid.shape))}, K], got {list(kept_ids.shape)}")
    used = valid[..., None] & (kept_ids != -1)
    check_columns("kept_ids", torch.where(used, kept_ids, 0), vocab_size)
    if checks_values(kept_ids):
        ordered = torch.where(used, kept_ids, -1).sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
        if bool(twice.any()):
            where = tuple(int(i) for i in twice.nonzero()[0])
            raise ValueError(
                f"kept_ids names {int(ordered[..., 1:][where])} twice at {list(where[:-1])}; a kept set has each id once"
            )


def truncated_stats_of_shard(
    logits: Tensor, targets: Tensor, keep: Tensor, shard: VocabShard, kept_ids: Tensor | None = None
) -> TokenStats:
    """Compute `truncated_token_stats` after its checks; `keep` [...] marks the tokens that count."""
    if not shard.truncation:
        return stats_of_shard(logits, targets, keep, shard)
    size = targets.numel(), logits.shape[-1]
    flat = logits.view(size) if shard.consume_logits else logits.reshape(size)
    if shard.truncation.kept_sets:
        assert kept_ids is not None
        kept, y = _kept_columns(flat, targets.reshape(-1), kept_ids.flatten(0, -2), shard)
        width = kept.shape[1]
        of_kept = replace(
            shard, start=0, valid=width, vocab_size=width, truncation=KEEP_ALL, consume_logits=False
        )  # fmt: skip
        stats = stats_of_shard(kept, y.view(targets.shape), keep, of_kept)
    else:
        floor = kept_floor(flat.detach()[:, : shard.valid], shard)
        stats = stats_of_shard(logits, targets, keep, shard, floor)
    outside = stats.logprobs == -torch.inf
    return stats._replace(logprobs=torch.where(outside, -torch.inf, stats.logprobs))


def _kept_columns(z: Tensor, targets: Tensor, kept_ids: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Gather this shard's kept logits, [T, K + 1], others −inf; the target is the last column, or −1.

    A row of them, in any order, is a shard of the truncated distribution.
    """
    ids = torch.cat([torch.where(kept_ids == targets[:, None], -1, kept_ids), targets[:, None]], 1)
    columns, here = shard.local(ids)
    if not z.shape[1]:
        return z.new_full(ids.shape, -torch.inf) + z.sum(), torch.full_like(targets, -1)
    small: Tensor = _Gather.apply(z, columns, here, shard.consume_logits)
    return small, torch.where(here[:, -1], ids.shape[1] - 1, -1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, z: Tensor, columns: Tensor, here: Tensor, consume: bool) -> Tensor:
        ctx.save_for_backward(z if consume else z.new_empty(0), columns, here)
        ctx.shape, ctx.consume = z.shape, consume  # type: ignore[attr-defined]
        return torch.where(here, z.gather(1, columns), -torch.inf)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, columns, here = saved_logits(ctx)
        dz = z.detach().zero_() if ctx.consume else grad.new_zeros(ctx.shape)  # type: ignore[attr-defined]
        # a column that is not here adds 0 to column 0
        dz.scatter_add_(1, columns, torch.where(here, grad, 0))
        if ctx.consume:  # type: ignore[attr-defined]
            mark_consumed(dz)
        return dz, None, None, None
