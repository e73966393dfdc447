"""What the call of a loss cannot say, and which layout its logits have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from parallel_rl.groups import group_rank, group_size
from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.truncation import KEEP_ALL, Truncation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.backends.choice import Backend


class PackedSequences(Protocol):
    """Makes the layout of a packed row once its length and the context group are known."""

    def __call__(self, seq_len: int, total: int, cp_size: int, cp_rank: int, cp_layout: CPLayout) -> SequenceLayout: ...


@dataclass(frozen=True)
class VocabOptions:
    """How the logits are to be read: what the call of a loss cannot say."""

    vocab_size: int | None = None
    vocab_start: int | None = None
    cp_layout: CPLayout = "zigzag"
    temperature: float = 1.0
    consume_logits: bool = False
    backend: Backend = "auto"
    truncation: Truncation = KEEP_ALL

    def shard(self, width: int, group: ProcessGroup | None, *, entropy: bool = False) -> VocabShard:
        """How this rank's `width` columns are read."""
        return VocabShard.of(
            width, group, self.vocab_size, self.vocab_start, temperature=self.temperature, entropy=entropy,
            truncation=self.truncation, consume_logits=self.consume_logits, backend=self.backend,
        )  # fmt: skip


@dataclass(frozen=True)
class NoConfig:
    """The config of a loss without options."""


def layout_of_logits(
    logits: Tensor,
    rows: int,
    width: int,
    context_group: ProcessGroup | None,
    packed_sequences: PackedSequences | None,
    cp_layout: CPLayout,
) -> SequenceLayout:
    """The layout of [B, S/cp, V/tp], or packed [1, T/cp, V/tp], for data [rows, width].

    Raises:
        ValueError: logits of another shape, as many sequences as the data has no rows.
    """
    if logits.dim() != 3:
        raise ValueError(
            f"next_token_logits must be [B, S/cp, V/tp] (packed: [1, T/cp, V/tp]), got {list(logits.shape)}"
        )
    cp = group_size(context_group), group_rank(context_group)
    if packed_sequences is not None:
        if logits.shape[0] != 1:
            raise ValueError(f"packed logits must be [1, T/cp, V/tp], got {list(logits.shape)}")
        layout = packed_sequences(width, logits.shape[1] * cp[0], *cp, cp_layout)
    else:
        layout = SequenceLayout.padded(
            rows, width, cp_size=cp[0], cp_rank=cp[1], cp_layout=cp_layout, device=logits.device
        )
    if layout.shape[0] != rows:
        raise ValueError(f"cu_seqlens describes {layout.shape[0]} sequences, the data has {rows} rows")
    if tuple(logits.shape[:2]) != layout.local_shape:
        raise ValueError(
            f"the logits have leading shape {list(logits.shape[:2])}; data of shape {[rows, width]} over cp = {cp[0]} "
            f"needs {list(layout.local_shape)}"
        )
    return layout
