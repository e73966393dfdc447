"""Log-probs of a loss under the sampler's truncation, and the tokens that then leave the mask."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from parallel_rl.metrics import Metric, Metrics
from parallel_rl.vocab.stats import TokenStats, stats_of_shard
from parallel_rl.vocab.truncated_stats import truncated_stats_of_shard
from parallel_rl.vocab.truncation import KEEP_ALL

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.base import LossFn
    from parallel_rl.losses.core.batch import Alignment, TokenBatch

#: fields of log-probs that the truncated policy of an earlier moment gave
_TRUNCATED_FIELDS = ("prev_logprobs", "generation_logprobs")


def read_truncated_head(
    loss_fn: LossFn, batch: TokenBatch, logits: Tensor, tensor_group: ProcessGroup | None
) -> TokenBatch:
    """The batch with statistics of the truncated policy, without the tokens that it, or an earlier one, does not keep."""
    options, layout, flat = loss_fn.options, batch.layout, logits.flatten(0, -2)
    targets, both = layout.shard(batch.data["input_ids"]), loss_fn.needs_untruncated
    kept_ids = layout.shard(batch.data["kept_ids"], fill=-1) if options.truncation.kept_sets else None
    shard = options.shard(logits.shape[-1], tensor_group, entropy=loss_fn.needs_entropy)
    # `collect` reads the same logits before the loss does: a truncation in place would be truncated again
    consume = options.consume_logits and torch.is_grad_enabled()
    truncated = replace(shard, consume_logits=consume and not both)
    stats = truncated_stats_of_shard(flat, targets, batch.mask, truncated, kept_ids)
    untruncated = None
    if both:
        whole = replace(shard, entropy=False, truncation=KEEP_ALL, consume_logits=consume)
        untruncated = stats_of_shard(flat, targets, batch.mask, whole)
    return without_dropped(loss_fn, batch, stats, untruncated)


def without_dropped(
    loss_fn: LossFn, batch: TokenBatch, stats: TokenStats, untruncated: TokenStats | None = None
) -> TokenBatch:
    """The batch with these statistics, without the tokens that the policy, or an earlier one, does not keep."""
    dropped = stats.logprobs.detach() == -torch.inf
    for name in _TRUNCATED_FIELDS:
        if name in loss_fn.token_fields:
            alignment: Alignment = "predictor" if name in loss_fn.predictor_fields else "token"
            dropped = dropped | (batch.field(name, alignment) == -torch.inf)
    batch = replace(batch, dropped=dropped)
    return replace(
        batch, token_stats=_masked(stats, batch.mask), untruncated=untruncated and _masked(untruncated, batch.mask)
    )


def with_dropped(metrics: Metrics, dropped: Tensor) -> Metrics:
    """The metrics and `dropped_tokens`, the number of valid tokens that left the mask."""
    count = Metric("count", dropped.sum(dtype=torch.float64))
    return Metrics({**{name: metrics.parts(name) for name in metrics}, "dropped_tokens": count})


def _masked(stats: TokenStats, mask: Tensor) -> TokenStats:
    entropy = None if stats.entropy is None else torch.where(mask, stats.entropy, 0)
    return TokenStats(torch.where(mask, stats.logprobs, 0), entropy, torch.where(mask, stats.lse, 0))
