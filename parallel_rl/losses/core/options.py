"""Constructor options of a loss: how it reads the vocabulary shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from parallel_rl.groups import group_size
from parallel_rl.layout import CPLayout
from parallel_rl.vocab.shards import KEEP_ALL, Truncation, VocabShard, check_logit_scale, check_spans

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.vocab.backends.choice import Backend


#: one number for all, or "per-sample": the field `temperature` [B] of the data
Temperature = float | Literal["per-sample"]


@dataclass(frozen=True)
class VocabOptions:
    """Constructor options of a loss, see `LossFn`; ValueError for a wrong temperature or scale."""

    vocab_size: int | None = None
    vocab_start: int | None = None
    cp_layout: CPLayout = "zigzag"
    temperature: Temperature | Tensor = 1.0
    consume_logits: bool = False
    backend: Backend = "auto"
    truncation: Truncation = KEEP_ALL
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        check_logit_scale(self.logit_scale)
        if isinstance(self.temperature, str) and not self.per_sample:
            raise ValueError(f"temperature = {self.temperature!r} must be a positive number or 'per-sample'")

    @property
    def per_sample(self) -> bool:
        return isinstance(self.temperature, str) and self.temperature == "per-sample"

    @property
    def one_policy(self) -> bool:
        """Return whether a row of logits gives one distribution for all tokens: untruncated, one temperature."""
        return not self.truncation and isinstance(self.temperature, float | int)

    def for_batch(self, local: LocalBatch) -> VocabOptions:
        """Set the temperature of each of this rank's tokens, [T_local], if samples have their own."""
        return replace(self, temperature=local.temperature) if self.per_sample else self

    def check_temperature(self) -> None:
        """Refuse a temperature per token; packing and context ranks would change their order."""
        if isinstance(self.temperature, torch.Tensor):
            raise ValueError(
                "temperature must be one number for all tokens, got a Tensor; 'per-sample' reads data['temperature'] [B]"
            )

    def check_spans(self, logits: Tensor, group: ProcessGroup | None) -> None:
        """Refuse a `vocab_start` that does not fit those of the other tensor ranks, which all call this."""
        check_spans(group, logits.shape[-1], self.vocab_size, self.vocab_start, logits)

    def shard(self, width: int, group: ProcessGroup | None, *, entropy: bool = False) -> VocabShard:
        """Describe this rank's `width` columns; temperatures per sample are NaN without `for_batch`."""
        tp = group_size(group)
        if tp > 1 and self.vocab_start is None and self.vocab_size and width >= self.vocab_size > 0:
            raise ValueError(
                f"the logits have {width} columns on each of {tp} tensor ranks, so the first alone holds all of vocab_size = "
                f"{self.vocab_size}; give each rank its own columns (GPTModel: parallel_output = True), or vocab_start= where "
                "the others hold padding"
            )
        temperature = torch.tensor(torch.nan) if isinstance(self.temperature, str) else self.temperature
        return VocabShard.of(
            width, group, self.vocab_size, self.vocab_start, temperature=temperature, entropy=entropy,
            truncation=self.truncation, consume_logits=self.consume_logits, backend=self.backend,
            logit_scale=self.logit_scale,
        )  # fmt: skip


@dataclass(frozen=True)
class NoConfig:
    """Config of a loss without options."""
