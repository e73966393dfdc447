"""OpenRLHF's next-token loss, with ring attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from parallel_rl.compat.dense import Count
from parallel_rl.compat.language import IGNORE_INDEX, next_token_loss
from parallel_rl.functional.kl import straight_through
from parallel_rl.groups import group_rank, group_size
from parallel_rl.layout import CPLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GPTLMLoss(nn.Module):
    """Next-token cross-entropy, a mean over labels that are not −100; without any, 0 (the origin: NaN).

    With `ring_attn_group`, whose ranks hold equal contiguous parts of the sequence, it is the mean of the ranks' own means,
    each without the target behind its part (Q34); `labels` are whole on every rank, and each gets the same value, with the
    gradient of its own part. With `context_parallel_group` nothing is lost: see `next_token_loss`.
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
        """Return the loss as `compat.language.GPTLMLoss`; with a ring, ValueError for the keywords of a share."""
        ring = self.ring_attn_group
        if ring is None:
            return next_token_loss(
                logits, labels, global_valid_toks, vocab_parallel_group, context_parallel_group, cp_layout
            )
        if global_valid_toks is not None or context_parallel_group is not None:
            raise ValueError("ring_attn_group has its own mean: leave out global_valid_toks and context_parallel_group")
        ranks = group_size(ring)
        length = labels.shape[-1] // ranks
        own = next_token_loss(
            logits, labels.narrow(-1, group_rank(ring) * length, length), tensor_group=vocab_parallel_group
        )
        total = own.detach().clone()
        if ranks > 1:
            dist.all_reduce(total, group=ring)
        return straight_through(total, own) / ranks
