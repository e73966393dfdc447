"""The default reader: log-probs and entropy of the predicted tokens, under the sampler's truncation too."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch

from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.checks import RECORDED
from parallel_rl.losses.core.loss import Loss, Reader
from parallel_rl.losses.core.one_row import stats_of_tree, targets_of_edges, tokens_of_edges
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.linear.token_stats import stats_of_head
from parallel_rl.vocab.shards import KEEP_ALL
from parallel_rl.vocab.stats import TokenStats, check_logits, check_targets, stats_of_shard
from parallel_rl.vocab.truncated_stats import check_kept_ids, truncated_stats_of_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.losses.core.options import VocabOptions
    from parallel_rl.segments import SharedRows
    from parallel_rl.vocab.linear.lm_head import LMHeadInput


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
    """Mask tokens that the policy, or a recorded one (per component), does not keep."""
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
    return TokenStats(*(None if x is None else torch.where(mask, x, 0) for x in stats))  # type: ignore[arg-type]


class LogProbReader(Reader):
    """Reader of log-probs and entropy, of the whole or a truncated policy."""

    @property
    def reads_tree(self) -> bool:
        return self.loss.requirements.reads == "log-probs" and self.loss.options.one_policy

    def check(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        check_vocabulary(self.loss, logits, data, tensor_group)

    def read(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        options = self.loss.options.for_batch(local)
        if options.truncation:
            return read_truncated_policy(local, logits, tensor_group, options)
        shared = local.layout.tree if self.reads_tree else None
        return TokenBatch(
            local, token_output(local, logits, tensor_group, options, self.loss.requirements.entropy, shared)
        )

    def read_head(
        self, local: LocalBatch, head: LMHeadInput, tensor_group: ProcessGroup | None
    ) -> tuple[TokenBatch, Tensor | None]:
        if self.loss.requirements.reads == "logits":
            return super().read_head(local, head, tensor_group)
        shared = local.layout.tree if self.reads_tree else None
        return project(local, head, tensor_group, self.loss.options.for_batch(local), self.loss.objective, shared)


def project(
    local: LocalBatch,
    head: LMHeadInput,
    tensor_group: ProcessGroup | None,
    options: VocabOptions,
    objective: Callable[[TokenBatch], Tensor],
    shared: SharedRows | None = None,
) -> tuple[TokenBatch, Tensor | None]:
    """Read token statistics, and an exact 0 that carries the gradients computed here.

    Args:
        objective: the local loss; if it separates over tokens, its gradient is computed in forward.
        shared: for hidden states in the order of a tree's edges; None: in the order of the tokens.
    """
    needs = local.requirements
    shard = options.shard(head.weight.shape[0], tensor_group, entropy=needs.entropy)

    targets, mask = local.layout.take(local.data["input_ids"], needs.shift), local.mask
    if shared is not None:
        targets, mask = targets_of_edges(targets, shared).clamp(min=0), shared.edges.any(mask)

    def with_stats(stats: TokenStats) -> TokenBatch:
        if shared is not None:
            stats = tokens_of_edges(stats, local.mask, shared)
        return without_dropped(local, stats) if options.truncation else TokenBatch(local, ModelOutput(stats))

    stats, carrier = stats_of_head(
        head,
        targets,
        mask,
        shard,
        local.kept_ids() if options.truncation.kept_sets else None,
        objective=(lambda stats: objective(with_stats(stats))) if needs.separates(options.truncation) else None,
        context_group=local.context_group,
    )
    return with_stats(stats), carrier


def token_output(
    local: LocalBatch,
    logits: Tensor,
    tensor_group: ProcessGroup | None,
    options: VocabOptions,
    entropy: bool,
    shared: SharedRows | None = None,
) -> ModelOutput:
    """Compute the untruncated statistics; `shared`: the logits are in the order of a tree's rows."""
    shard = options.shard(logits.shape[-1], tensor_group, entropy=entropy)
    targets = local.layout.take(local.data["input_ids"], local.requirements.shift)
    rows = logits.flatten(0, -2)
    if shared is not None:
        return ModelOutput(stats_of_tree(rows, targets, local.mask, shard, shared))
    return ModelOutput(stats_of_shard(rows, targets, local.mask, shard))


def check_vocabulary(loss: Loss, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
    options = loss.options
    options.check_temperature()
    check_logits(logits, options.consume_logits, options.backend)
    shard = options.shard(logits.shape[-1], tensor_group)
    if checks_values(data["input_ids"]):
        check_targets(torch.where(loss.scored(data), data["input_ids"], 0), shard.vocab_size, ignore_index=None)
    if options.truncation.kept_sets:
        check_kept_ids(data["kept_ids"], loss.scored(data), shard.vocab_size)


def check_declared(loss: Loss) -> None:
    if loss.requirements.reads == "log-probs" and not isinstance(loss.reader, LogProbReader):
        raise ValueError(
            f"{type(loss).__name__} has a {type(loss.reader).__name__} and requires reads = 'log-probs'; declare "
            "reads='logits' of Requirements, or 'scalar'"
        )
