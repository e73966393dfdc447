"""A loss's log-probs and entropy from hidden states and the LM head's weight; its gradient too, if it separates over tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.truncated_policy import without_dropped
from parallel_rl.vocab.linear.logits import check_whole
from parallel_rl.vocab.linear.token_stats import stats_of_head

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.losses.core.options import VocabOptions
    from parallel_rl.losses.core.requirements import Requirements
    from parallel_rl.vocab.linear.lm_head import LMHeadInput
    from parallel_rl.vocab.stats import TokenStats


def check_lm_head(
    loss: str, needs: Requirements, options: VocabOptions, head: LMHeadInput, tensor_group: ProcessGroup | None
) -> None:
    """Refuse a loss on a scalar head, options that need logits, and an invalid `head`.

    Raises:
        ValueError: any of them; `loss` is the name that it shows.
    """
    if needs.reads == "scalar":
        raise ValueError(
            f"{loss} reads one number a position, so it takes no LMHeadInput; give it the scalar head's output"
        )
    if needs.untruncated:
        raise ValueError(
            f"{options.truncation} with a KL to a reference reads two distributions of a token, the truncated one and "
            "the whole; an LMHeadInput gives one: take logits, or the KL against 'prev'"
        )
    if options.consume_logits:
        raise ValueError("consume_logits = True has no effect with an LMHeadInput, which has no logits; leave it out")
    if options.logit_scale != 1:
        raise ValueError(
            f"logit_scale = {options.logit_scale} is of logits; an LMHeadInput has its own, LMHeadInput(..., logit_scale=)"
        )
    if head.hidden.dim() != 3:
        raise ValueError(
            f"hidden must be [B, S/cp, D] (packed: [1, T/cp, D]; sequence_first: [S/cp, B, D]), got "
            f"{list(head.hidden.shape)}"
        )
    if head.mode == "in_forward" and not (needs.separates(options.truncation) or needs.reads == "rows"):
        why = " in this configuration"
        if needs.token_separable:
            why = f" with {options.truncation}, which changes the weight of the tokens that stay, or may do so,"
        raise ValueError(
            f"mode = 'in_forward' needs a loss that is a sum over tokens; {loss}{why} is not. 'auto' keeps or recomputes "
            "logits for it"
        )
    head.check(tensor_group, options.vocab_size)
    if needs.reads == "logits":
        check_whole(head, tensor_group)


def project(
    local: LocalBatch,
    head: LMHeadInput,
    tensor_group: ProcessGroup | None,
    options: VocabOptions,
    objective: Callable[[TokenBatch], Tensor],
) -> tuple[TokenBatch, Tensor | None]:
    """The batch with its token statistics, and the exact 0 that carries the gradient where it is computed here already.

    Args:
        objective: the share of the loss, of which gradients are computed in forward if it separates over tokens.
    """
    needs = local.requirements
    shard = options.shard(head.weight.shape[0], tensor_group, entropy=needs.entropy)

    def with_stats(stats: TokenStats) -> TokenBatch:
        return without_dropped(local, stats) if options.truncation else TokenBatch(local, ModelOutput(stats))

    stats, carrier = stats_of_head(
        head,
        local.layout.take(local.data["input_ids"], needs.shift),
        local.mask,
        shard,
        local.kept_ids() if options.truncation.kept_sets else None,
        objective=(lambda stats: objective(with_stats(stats))) if needs.separates(options.truncation) else None,
        context_group=local.context_group,
    )
    return with_stats(stats), carrier
