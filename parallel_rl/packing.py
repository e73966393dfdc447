"""The same loss on one packed row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from parallel_rl.layout import CPLayout, SequenceLayout

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.base import LossFn
    from parallel_rl.metrics import Metrics
    from parallel_rl.statistics import Statistics
    from parallel_rl.vocab.linear.lm_head import LMHeadInput


class SequencePackingLossWrapper:
    """A loss on packed logits [1, T/cp, V/tp] with whole, unpacked `data` [B, S]; the numbers are those of the padded batch.

    Sequence i is row i of the data. Its positions are `[cu_seqlens_q_padded[i], cu_seqlens_q_padded[i + 1])` of the
    row, of which the first `cu_seqlens_q[i + 1] − cu_seqlens_q[i]` are tokens. Kernel launches and collectives do not
    grow with the number of sequences; preference pairs are (even, odd) sequences of one row.

    Args:
        loss_fn: any loss of this library.
        cu_seqlens_q: [B + 1] integer, true lengths summed up from 0.
        cu_seqlens_q_padded: [B + 1] integer, with each sequence's padding; None where there is none.

    Raises:
        ValueError: at the call, on all ranks: bounds that do not increase or do not end at T, padded lengths that are
            not divisible by 2·cp, a number of sequences other than the data's rows; what `loss_fn` raises.
    """

    def __init__(self, loss_fn: LossFn, cu_seqlens_q: Tensor, cu_seqlens_q_padded: Tensor | None = None) -> None:
        self.loss_fn = loss_fn
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_q_padded = cu_seqlens_q_padded
        self._layouts: dict[tuple, SequenceLayout] = {}

    @property
    def needs_statistics(self) -> bool:
        return self.loss_fn.needs_statistics

    def __call__(
        self,
        next_token_logits: Tensor | LMHeadInput,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        *,
        statistics: Statistics | None = None,
    ) -> tuple[Tensor, Metrics]:
        """The call of `LossFn`, on packed logits."""
        return self.loss_fn(
            next_token_logits, data, global_valid_seqs, global_valid_toks,
            vocab_parallel_rank, vocab_parallel_group, context_parallel_group,
            statistics=statistics, packed_sequences=partial(self._layout, next_token_logits.device),
        )  # fmt: skip

    def collect(
        self,
        next_token_logits: Tensor | LMHeadInput,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        """The `collect` of the wrapped loss, on packed logits."""
        return self.loss_fn.collect(
            next_token_logits, data, global_valid_seqs, global_valid_toks,
            vocab_parallel_rank, vocab_parallel_group, context_parallel_group,
            packed_sequences=partial(self._layout, next_token_logits.device),
        )  # fmt: skip

    def _layout(
        self, device: torch.device, seq_len: int, total: int, cp_size: int, cp_rank: int, cp_layout: CPLayout
    ) -> SequenceLayout:
        key = (device, seq_len, total, cp_size, cp_rank, cp_layout)
        if key not in self._layouts:
            self._layouts[key] = SequenceLayout.packed(
                self.cu_seqlens_q,
                self.cu_seqlens_q_padded,
                seq_len=seq_len,
                total=total,
                cp_size=cp_size,
                cp_rank=cp_rank,
                cp_layout=cp_layout,
                device=device,
            )
        return self._layouts[key]
