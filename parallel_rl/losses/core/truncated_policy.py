"""Log-probs under the sampler's truncation, and the tokens that it masks."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch

from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.checks import RECORDED
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.vocab.stats import TokenStats, stats_of_shard
from parallel_rl.vocab.truncated_stats import truncated_stats_of_shard
from parallel_rl.vocab.truncation import KEEP_ALL

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.losses.core.options import VocabOptions


def read_truncated_policy(
    local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None, options: VocabOptions
) -> TokenBatch:
    """Read the truncated policy's statistics; tokens that it, or an earlier one, does not keep are masked."""
    layout, flat, needs = local.layout, logits.flatten(0, -2), local.requirements
    targets = layout.shard(local.data["input_ids"], needs.shift)
    kept_ids = local.kept_ids() if options.truncation.kept_sets else None
    shard = options.shard(logits.shape[-1], tensor_group, entropy=needs.entropy)
    # `collect` reads the same logits before the loss: truncating in place would truncate twice
    consume = options.consume_logits and torch.is_grad_enabled()
    truncated = replace(shard, consume_logits=consume and not needs.untruncated)
    stats = truncated_stats_of_shard(flat, targets, local.mask, truncated, kept_ids)
    untruncated = None
    if needs.untruncated:
        whole = replace(shard, entropy=False, truncation=KEEP_ALL, consume_logits=consume)
        untruncated = stats_of_shard(flat, targets, local.mask, whole)
    return without_dropped(local, stats, untruncated)


def without_dropped(local: LocalBatch, stats: TokenStats, untruncated: TokenStats | None = None) -> TokenBatch:
    """Make the batch without the tokens that the policy, or an earlier one, does not keep.

    Each component of a sum also leaves out the tokens that its own fields mark as dropped.
    """
    now = stats.logprobs.detach() == -torch.inf
    parts = {name: replace(part, dropped=now | _dropped_before(part)) for name, part in local.parts.items()}
    if parts:
        dropped = reduce(or_, (part.dropped for part in parts.values() if part.dropped is not None))
        read = replace(local, dropped=now)
    else:
        dropped = now | _dropped_before(local)
        read = replace(local, dropped=dropped)
    whole = None if untruncated is None else masked_stats(untruncated, read.mask)
    output = ModelOutput(masked_stats(stats, read.mask), untruncated=whole)
    return TokenBatch(replace(local, dropped=dropped, parts=parts), output)


def _dropped_before(local: LocalBatch) -> Tensor:
    """Return [T_local] bool: valid tokens that an earlier policy did not keep, by a log-prob of −inf."""
    names = [name for name, ours in RECORDED.items() if ours and name in local.requirements.names]
    none = torch.zeros_like(local.mask)
    return reduce(or_, (local.field(name) == -torch.inf for name in names), none)


def with_dropped(metrics: Metrics, dropped: Tensor | None) -> Metrics:
    """Add the metric `dropped_tokens`, the number of valid tokens dropped by truncation (None: no metric)."""
    if dropped is None:
        return metrics
    count = Metric("count", dropped.sum(dtype=torch.float64))
    return Metrics({**{name: metrics.parts(name) for name in metrics}, "dropped_tokens": count})


def masked_stats(stats: TokenStats, mask: Tensor) -> TokenStats:
    """Set the statistics to 0, with gradient 0, at masked places."""
    return TokenStats(*(None if x is None else torch.where(mask, x, 0) for x in stats))  # type: ignore[arg-type]
