"""Constructor options of a loss: how it reads the vocabulary shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel_rl.layout import CPLayout
from parallel_rl.vocab.shards import VocabShard
from parallel_rl.vocab.truncation import KEEP_ALL, Truncation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.backends.choice import Backend


@dataclass(frozen=True)
class VocabOptions:
    """Constructor options of a loss, see `LossFn`."""

    vocab_size: int | None = None
    vocab_start: int | None = None
    cp_layout: CPLayout = "zigzag"
    temperature: float = 1.0
    consume_logits: bool = False
    backend: Backend = "auto"
    truncation: Truncation = KEEP_ALL

    def shard(self, width: int, group: ProcessGroup | None, *, entropy: bool = False) -> VocabShard:
        """Build the `VocabShard` that says how this rank's `width` columns are read."""
        return VocabShard.of(
            width, group, self.vocab_size, self.vocab_start, temperature=self.temperature, entropy=entropy,
            truncation=self.truncation, consume_logits=self.consume_logits, backend=self.backend,
        )  # fmt: skip


@dataclass(frozen=True)
class NoConfig:
    """The config of a loss without options."""
