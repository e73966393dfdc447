"""What a loss reads of the model, from hidden states and the head's weight."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from parallel_rl.losses.core.truncated_policy import without_dropped
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.linear.logits import check_whole, whole_logits
from parallel_rl.vocab.linear.token_stats import stats_of_head

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.base import LossFn
    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.vocab.stats import TokenStats


def check_fused_head(loss_fn: LossFn, head: LMHeadInput, tensor_group: ProcessGroup | None) -> None:
    """Raises ValueError for a loss on a scalar head, for options that need logits, and for what does not fit of the head."""
    name = type(loss_fn).__name__
    if loss_fn.scalar_head:
        raise ValueError(
            f"{name} reads one number a position, so it takes no LMHeadInput; give it the scalar head's output"
        )
    if loss_fn.needs_untruncated:
        raise ValueError(
            f"{loss_fn.options.truncation} with a KL to a reference reads two distributions of a token, the truncated one and "
            "the whole; an LMHeadInput gives one: take logits, or the KL against 'prev'"
        )
    if loss_fn.options.consume_logits:
        raise ValueError("consume_logits = True has no effect with an LMHeadInput, which has no logits; leave it out")
    if head.hidden.dim() != 3:
        raise ValueError(
            f"hidden must be [B, S/cp, D] (packed: [1, T/cp, D]; sequence_first: [S/cp, B, D]), got "
            f"{list(head.hidden.shape)}"
        )
    if head.mode == "in_forward" and not loss_fn.token_separable:
        raise ValueError(
            f"mode = 'in_forward' needs a loss that is a sum over tokens; {name} in this configuration is not. 'auto' keeps "
            "or recomputes logits for it"
        )
    head.check(tensor_group)
    if not loss_fn.reads_log_probs():
        check_whole(head, tensor_group)


def project(loss_fn: LossFn, batch: TokenBatch, head: LMHeadInput, tensor_group: ProcessGroup | None) -> TokenBatch:
    """The batch with its token statistics, whose gradient may be computed here already.

    A loss that reads more than log-probs and entropy gets whole logits.
    """
    if not loss_fn.reads_log_probs():
        return loss_fn._read_head(batch, whole_logits(head, loss_fn._rows_read(batch), tensor_group), tensor_group)
    options = loss_fn.options
    shard = options.shard(head.weight.shape[0], tensor_group, entropy=loss_fn.needs_entropy)
    kept_ids = batch.layout.shard(batch.data["kept_ids"], fill=-1) if options.truncation.kept_sets else None

    def with_stats(stats: TokenStats) -> TokenBatch:
        if options.truncation:
            return without_dropped(loss_fn, batch, stats)
        return replace(batch, token_stats=stats).sharing(batch)

    stats, carrier = stats_of_head(
        head, batch.layout.take(batch.data["input_ids"]), batch.mask, shard, kept_ids,
        objective=(lambda stats: loss_fn.compute(with_stats(stats))[0]) if loss_fn.token_separable else None,
        context_group=batch.context_group,
    )  # fmt: skip
    done = with_stats(stats)
    return replace(done, carrier=carrier).sharing(done)
