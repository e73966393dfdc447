"""OpenRLHF's aggregation, and its next-token, supervised and value losses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from parallel_rl.compat.dense import Count, Step, as_count, dense_batch
from parallel_rl.compat.language import IGNORE_INDEX, next_token_loss
from parallel_rl.counts import Aggregation, token_weights
from parallel_rl.functional.kl import straight_through
from parallel_rl.groups import group_rank, group_size
from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.value import clipped_squared_error, squared_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# the origin's counts of the step: (dp_size, batch_num_tokens, global_batch_size)
Totals = tuple[float, "Count | None", "Count | None"]


def mode_of(token_level_loss: bool) -> Aggregation:
    return "token-mean" if token_level_loss else "seq-mean-token-mean"


def with_totals(batch: TokenBatch, totals: Totals, token_level_loss: bool, step: Step) -> tuple[TokenBatch, float]:
    """Return the batch with the origin's counts of the step, if given, and the factor of the loss."""
    dp_size, tokens, sequences = totals
    total = tokens if token_level_loss else sequences
    if total is None:
        return batch, 1.0
    if step.seqs is not None:
        raise ValueError(
            "batch_num_tokens and global_batch_size go with dp_size; global_valid_seqs and global_valid_toks give this rank's "
            "local loss instead: give one or the other"
        )
    count = as_count(total, batch.mask.device)
    counts = batch.counts._replace(**{"toks" if token_level_loss else "seqs": count})
    return replace(batch, local=replace(batch.local, counts=counts)), dp_size


def _aggregated(batch: TokenBatch, values: Tensor, token_level_loss: bool, totals: Totals, step: Step) -> Tensor:
    batch, factor = with_totals(batch, totals, token_level_loss, step)
    weights = token_weights(mode_of(token_level_loss), batch.tokens_per_sequence, batch.counts)
    return batch.weighted_sum(values, weights) * factor


def aggregate_loss(
    loss: Tensor,
    loss_mask: Tensor | None,
    token_level_loss: bool = True,
    dp_size: float = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    *,
    global_valid_seqs: Count | None = None,
    global_valid_toks: Count | None = None,
    context_parallel_group: ProcessGroup | None = None,
) -> Tensor:
    """Average over tokens, or over non-empty rows the means over their tokens; 0 of none.

    Args:
        loss, loss_mask: [B, A/cp]; a mask of None: all tokens.
        batch_num_tokens, global_batch_size: counts of the step; the mean is multiplied by `dp_size`, over which gradients are
            averaged.
        global_valid_seqs, global_valid_toks: the same counts (of rows with a token) for a local loss without that factor.
    """
    step = Step(global_valid_seqs, global_valid_toks, context_parallel_group)
    batch = dense_batch(loss, loss_mask, step=step, count_empty=False)
    return _aggregated(batch, batch.logprobs, token_level_loss, (dp_size, batch_num_tokens, global_batch_size), step)


class SFTLoss(nn.Module):
    """Negative log-likelihood, aggregated by `aggregate_loss`."""

    def __init__(self, token_level_loss: bool = True) -> None:
        super().__init__()
        self.token_level_loss = token_level_loss

    def forward(
        self,
        per_token_logps: Tensor,
        loss_mask: Tensor,
        dp_size: float = 1,
        batch_num_tokens: Count | None = None,
        global_batch_size: Count | None = None,
        *,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss; see `aggregate_loss` for the counts."""
        return aggregate_loss(
            -per_token_logps,
            loss_mask,
            self.token_level_loss,
            dp_size,
            batch_num_tokens,
            global_batch_size,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            context_parallel_group=context_parallel_group,
        )


class ValueLoss(nn.Module):
    """½·(V − R)² by `aggregate_loss`; with `clip_eps` the larger of it and that of V clipped around V_old."""

    def __init__(self, clip_eps: float | None = None, token_level_loss: bool = True) -> None:
        super().__init__()
        self.clip_eps, self.token_level_loss = clip_eps, token_level_loss

    def forward(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor | None = None,
        dp_size: float = 1,
        batch_num_tokens: Count | None = None,
        global_batch_size: Count | None = None,
        *,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss of [B, A/cp]; a mask of None: all tokens. See `aggregate_loss` for the counts."""
        step = Step(global_valid_seqs, global_valid_toks, context_parallel_group)
        fields = {"old": old_values, "returns": returns}
        batch = dense_batch(values, action_mask, fields, step, count_empty=False)
        error = squared_error(batch.logprobs, batch["returns"])
        if self.clip_eps is not None:
            error = clipped_squared_error(batch.logprobs, batch["returns"], batch["old"], self.clip_eps)
        totals = (dp_size, batch_num_tokens, global_batch_size)
        return 0.5 * _aggregated(batch, error, self.token_level_loss, totals, step)


class GPTLMLoss(nn.Module):
    """Next-token cross-entropy, a mean over labels that are not −100; without any, 0 (the origin: NaN).

    `ring_attn_group` ranks hold equal contiguous parts of the sequence and whole `labels`. All return the mean of the ranks'
    means, with the gradient of their part; each lacks the target after its part (Q34). `context_parallel_group` lacks none.
    """

    def __init__(self, ring_attn_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.IGNORE_INDEX = IGNORE_INDEX
        self.ring_attn_group = ring_attn_group

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        global_valid_toks: Count | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        cp_layout: CPLayout = "zigzag",
    ) -> Tensor:
        """Return the loss as `compat.language.GPTLMLoss`; with a ring, ValueError for the step's counts."""
        ring = self.ring_attn_group
        if ring is None:
            return next_token_loss(
                logits, labels, global_valid_toks, vocab_parallel_group, context_parallel_group, cp_layout
            )
        if global_valid_toks is not None or context_parallel_group is not None:
            raise ValueError("ring_attn_group has its own mean: leave out global_valid_toks and context_parallel_group")
        ranks = group_size(ring)
        length = labels.shape[-1] // ranks
        local = next_token_loss(
            logits, labels.narrow(-1, group_rank(ring) * length, length), tensor_group=vocab_parallel_group
        )
        total = local.detach().clone()
        if ranks > 1:
            dist.all_reduce(total, group=ring)
        return straight_through(total, local) / ranks
