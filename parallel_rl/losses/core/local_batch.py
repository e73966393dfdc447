"""One micro-batch on one rank before the model's output is read: the data in the order of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as made_by
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from parallel_rl.counts import ValidCounts
from parallel_rl.groups import group_rank, group_sum
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.requirements import Requirements
from parallel_rl.losses.core.turns import TurnLayout, turn_starts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.layout import SequenceLayout
    from parallel_rl.statistics import Statistics
    from parallel_rl.vocab.linear.lm_head import LMHeadInput

_NOTHING = Requirements()
_OF_ALL = ("input_ids", "token_mask", "sample_mask")  # fields that no loss declares


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """The data, where its tokens lie on this rank, and what was computed from both already; the plumbing of `TokenBatch`.

    Attributes:
        data: the whole, token-aligned tensors.
        layout: which token each local position holds.
        counts: valid sequences and tokens of the whole step.
        context_group: the group over which a sequence is spread.
        requirements: of the loss, for the alignment of its fields.
        statistics: of the whole step, for the losses that need them.
        heads: fields that are hidden states and a head; the data has a stand-in of the logits' shape.
        dropped: [T_local] bool, valid tokens that left the mask because a truncated policy does not keep them.
        weights: [B, S] float64 of the tokens, 0 where none is valid, for a loss that reads them.
        parts: of a loss that is a sum of others, each one's view of the batch.
        cut_rows: the rows of the data are cut over context ranks, as those of a host's log-probs; none is whole on each.
    """

    data: Mapping[str, Tensor]
    layout: SequenceLayout
    counts: ValidCounts
    context_group: ProcessGroup | None = None
    requirements: Requirements = _NOTHING
    statistics: Statistics | None = None
    dropped: Tensor | None = None
    heads: Mapping[str, LMHeadInput] = made_by(default_factory=dict)
    weights: Tensor | None = None
    parts: Mapping[str, LocalBatch] = made_by(default_factory=dict)
    cut_rows: bool = False

    @cached_property
    def valid(self) -> Tensor:
        """[B, S] bool: whole, token-aligned. Column 0 has no predictor; without a shift it needs none."""
        return valid_tokens(self.data, self.requirements.shift)

    @cached_property
    def mask(self) -> Tensor:
        """[T_local] bool: positions whose token (the predicted one, with a shift) carries loss."""
        shift = self.requirements.shift
        _, here = self.layout.places(shift)
        mask = self.layout.take(self.valid, shift) & here
        return mask if self.dropped is None else mask & ~self.dropped

    @cached_property
    def sequence_mask(self) -> Tensor:
        """[B] bool."""
        return self.data["sample_mask"].bool()

    @cached_property
    def tokens_per_sequence(self) -> Tensor:
        """[B] valid tokens of each sequence, over all context ranks."""
        if self.dropped is not None:  # known where the token is only
            return self.layout.segment_sum(self.mask.double(), self.context_group).to(torch.int64)
        return self.row_sum(self.valid)

    @property
    def token_unit(self) -> str:
        """The unit of the token count of the step."""
        counted = self.weights is not None and self.statistics is not None and self.requirements.counted
        return "weighted tokens" if counted else "tokens"

    @cached_property
    def scale(self) -> Tensor | None:
        """[T_local] float64 weights of the local tokens, for a loss that reads them."""
        return None if self.weights is None else self.layout.take(self.weights, self.requirements.shift)

    @cached_property
    def divisors(self) -> tuple[Tensor, ValidCounts]:
        """[B] what the tokens of each sequence add to a denominator, and the counts of the step: numbers or sums of weights."""
        if self.weights is None or self.requirements.token_weights == "count":
            return self.tokens_per_sequence, self.counts
        sums = self.row_sum(self.weights)
        if self.dropped is not None:
            assert self.scale is not None
            sums = self.layout.segment_sum(torch.where(self.mask, self.scale, 0), self.context_group)
        if not self.statistics:  # where the sum of the step is in no denominator
            return sums, self.counts
        total = self.statistics["weight_sum"]
        return sums, ValidCounts(self.counts.seqs, torch.where(total > 0, total, 1))

    @cached_property
    def turns(self) -> TurnLayout:
        """The turns that `segment_ids` tells apart, at the local positions."""
        self.check_declared("segment_ids")
        return TurnLayout.of(self.layout, self.data["segment_ids"], self.valid, self.requirements.shift)

    @cached_property
    def turn_starts(self) -> Tensor:
        """[T_local] bool: the first valid token of each turn."""
        return self.layout.shard(turn_starts(self.data["segment_ids"], self.valid), self.requirements.shift, fill=False)

    @cached_property
    def tokens_per_turn(self) -> Tensor:
        """[T_local] valid tokens of each position's turn, over all context ranks."""
        if self.dropped is not None:
            return self.turns.sum(self.mask.double(), self.context_group).to(torch.int64)
        return self.turns.tokens

    @property
    def temperature(self) -> Tensor:
        """[T_local] of each token's sample; 1 where the sample is masked."""
        return self.layout.expand(torch.where(self.sequence_mask, self.data["temperature"], 1.0))

    def check_declared(self, name: str, per: Literal["token", "sequence"] | None = None) -> None:
        """Refuse a field that the loss does not declare: nothing would check it, and a trainer would not make it.

        Args:
            per: how the loss reads it; None: by itself.

        Raises:
            ValueError: names the field, and how one is declared or read.
        """
        if name not in self.requirements.names and name not in _OF_ALL:
            declared = ", ".join(self.requirements.names) or "none"
            raise ValueError(
                f"the loss reads the field {name!r}, which it does not declare (declared: {declared}); add it to token_fields "
                "[B, S] or sequence_fields [B] of register_objective, or to the fields of Requirements"
            )
        sequence = name == "sample_mask" or self.requirements.field(name).per == "sequence"
        if per == "token" and sequence:
            raise ValueError(
                f"the field {name!r} has one value per sequence, [B]; read it by batch.per_sequence({name!r}), which "
                "batch.expand(...) repeats at each token"
            )
        if per == "sequence" and not sequence:
            raise ValueError(f"the field {name!r} has values per token, [B, S]; read it by batch[{name!r}]")

    def row_sum(self, x: Tensor) -> Tensor:
        """[B, S] of the data to [B]: sums over whole sequences."""
        return group_sum(x.sum(1), self.context_group) if self.cut_rows else x.sum(1)

    def masked(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """[T_local], or K quantities [K, T_local]: x, and a 0 of `dtype` at masked places."""
        return torch.where(self.mask, x, self.zero(dtype))

    def zero(self, dtype: torch.dtype | None) -> Tensor:
        """A 0-dim 0, made once: a Python number would become a new tensor in each `where`."""
        if dtype not in self._zeros:
            self._zeros[dtype] = torch.zeros((), dtype=dtype, device=self.mask.device)
        return self._zeros[dtype]

    def field(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """[T_local] a field [B, S] ([B, S, K]: [T_local, K]), 0 at masked places; a float one in `dtype`, if given."""
        needs = self.requirements
        shift = needs.shift and needs.field(name).alignment == "token"
        key = name, dtype
        if key not in self._fields:
            together = needs.plain_names()
            if name in together:
                stacked = torch.stack([in_dtype(self.data[each], dtype) for each in together]).flatten(1)
                found = self.masked(stacked.index_select(1, self.layout.places(shift)[0]), dtype)
                self._fields.update({(each, dtype): x for each, x in zip(together, found, strict=True)})
            else:
                local = self.layout.take(in_dtype(self.data[name], dtype), shift)
                self._fields[key] = torch.where(self.mask.view(-1, *[1] * (local.dim() - 1)), local, 0)
        return self._fields[key]

    def unmasked(self, name: str) -> Tensor:
        """[T_local, ...] a field that comes in the order of the logits, as it is, masked places included."""
        return self.data[name].flatten(0, 1)

    def kept_ids(self) -> Tensor:
        """[T_local, K] the sampler's kept token ids, padded with −1."""
        return self.layout.shard(self.data["kept_ids"], self.requirements.shift, fill=-1)

    def once(self, total: Tensor, *, of_tokens: bool) -> Tensor:
        """A sum over whole data, which every context rank holds, as this rank's part of the sum over ranks."""
        here = (of_tokens and self.cut_rows) or group_rank(self.context_group) == 0
        return total if here else torch.zeros_like(total)

    @cached_property
    def _fields(self) -> dict[tuple[str, torch.dtype | None], Tensor]:
        return {}

    @cached_property
    def _zeros(self) -> dict[torch.dtype | None, Tensor]:
        return {}


def in_dtype(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Floats in `dtype`, if given; integers as they are."""
    return values if dtype is None or not values.is_floating_point() else values.to(dtype)
