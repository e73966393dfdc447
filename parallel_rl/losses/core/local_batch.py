"""One micro-batch on one rank before the model's output is read: data in the order of the logits."""

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
_OF_ALL = ("input_ids", "token_mask", "sample_mask")  # available to every loss


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """Data, layout and values cached from both; wrapped by `TokenBatch`.

    Attributes:
        data: whole, token-aligned tensors.
        layout: which token each local position holds.
        counts: valid sequences and tokens of the whole step.
        dropped: [T_local] bool, valid tokens masked because a truncated policy does not keep them.
        heads: fields given as hidden states and a head; the data has a stand-in of the logits' shape.
        weights: [B, S] float64 token weights, 0 at invalid tokens, if the loss reads them.
        parts: the view of each component, for a sum of losses.
        cut_rows: the data's rows are split over context ranks (a host's log-probs), not whole on each.
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
        """Return [B, S] bool, token-aligned. Column 0 has no predictor; without a shift it needs none."""
        return valid_tokens(self.data, self.requirements.shift)

    @cached_property
    def mask(self) -> Tensor:
        """Return [T_local] bool: positions whose (with a shift predicted) token contributes to the loss."""
        shift = self.requirements.shift
        _, here = self.layout.places(shift)
        mask = self.layout.take(self.valid, shift) & here
        return mask if self.dropped is None else mask & ~self.dropped

    @cached_property
    def sequence_mask(self) -> Tensor:
        return self.data["sample_mask"].bool()

    @cached_property
    def tokens_per_sequence(self) -> Tensor:
        """Return [B] valid tokens of each sequence, over all context ranks."""
        if self.dropped is not None:  # known only at the token's position
            return self.layout.segment_sum(self.mask.double(), self.context_group).to(torch.int64)
        return self.row_sum(self.valid)

    @property
    def token_unit(self) -> str:
        counted = self.weights is not None and self.statistics is not None and self.requirements.counted
        return "weighted tokens" if counted else "tokens"

    @cached_property
    def scale(self) -> Tensor | None:
        """Return [T_local] float64 token weights, or None if the loss reads none."""
        return None if self.weights is None else self.layout.take(self.weights, self.requirements.shift)

    @cached_property
    def divisors(self) -> tuple[Tensor, ValidCounts]:
        """Return each sequence's part [B] of a denominator, and the step's counts, or sums of weights."""
        if self.weights is None or self.requirements.token_weights == "count":
            return self.tokens_per_sequence, self.counts
        sums = self.row_sum(self.weights)
        if self.dropped is not None:
            assert self.scale is not None
            sums = self.layout.segment_sum(torch.where(self.mask, self.scale, 0), self.context_group)
        if not self.statistics:  # the step's sum is in no denominator
            return sums, self.counts
        total = self.statistics["weight_sum"]
        return sums, ValidCounts(self.counts.seqs, torch.where(total > 0, total, 1))

    @cached_property
    def turns(self) -> TurnLayout:
        self.check_declared("segment_ids")
        return TurnLayout.of(self.layout, self.data["segment_ids"], self.valid, self.requirements.shift)

    @cached_property
    def turn_starts(self) -> Tensor:
        """Return [T_local] bool: the first valid token of each turn."""
        return self.layout.shard(turn_starts(self.data["segment_ids"], self.valid), self.requirements.shift, fill=False)

    @cached_property
    def tokens_per_turn(self) -> Tensor:
        """Return [T_local] valid tokens of each position's turn, over all context ranks."""
        if self.dropped is not None:
            return self.turns.sum(self.mask.double(), self.context_group).to(torch.int64)
        return self.turns.tokens

    @property
    def temperature(self) -> Tensor:
        """Return [T_local] temperature of each token's sample; 1 where the sample is masked."""
        return self.layout.expand(torch.where(self.sequence_mask, self.data["temperature"], 1.0))

    def check_declared(self, name: str, per: Literal["token", "sequence"] | None = None) -> None:
        """Raise ValueError for a field that the loss does not declare, or declares otherwise than `per`."""
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
        """Sum [B, S] of the data over whole sequences, [B]."""
        return group_sum(x.sum(1), self.context_group) if self.cut_rows else x.sum(1)

    def masked(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Put a 0 of `dtype` at masked places of x, [T_local] or [K, T_local]."""
        return torch.where(self.mask, x, self.zero(dtype))

    def zero(self, dtype: torch.dtype | None) -> Tensor:
        """Return a cached 0-dim 0; a Python number would become a new tensor in each `where`."""
        if dtype not in self._zeros:
            self._zeros[dtype] = torch.zeros((), dtype=dtype, device=self.mask.device)
        return self._zeros[dtype]

    def field(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a field [B, S] as [T_local] ([B, S, K]: [T_local, K]), 0 at masked places; floats in `dtype`."""
        needs = self.requirements
        shift = needs.shift and needs.field(name).alignment == "token"
        key = name, dtype
        if key not in self._fields:
            plain = needs.plain_names()
            if name in plain:
                stacked = torch.stack([in_dtype(self.data[other], dtype) for other in plain]).flatten(1)
                values = self.masked(stacked.index_select(1, self.layout.places(shift)[0]), dtype)
                self._fields.update({(other, dtype): x for other, x in zip(plain, values, strict=True)})
            else:
                local = self.layout.take(in_dtype(self.data[name], dtype), shift)
                self._fields[key] = torch.where(self.mask.view(-1, *[1] * (local.dim() - 1)), local, 0)
        return self._fields[key]

    def unmasked(self, name: str) -> Tensor:
        """Return [T_local, ...] of a field in the order of the logits, masked places included."""
        return self.data[name].flatten(0, 1)

    def kept_ids(self) -> Tensor:
        """Return [T_local, K] the sampler's kept token ids, padded with −1."""
        return self.layout.shard(self.data["kept_ids"], self.requirements.shift, fill=-1)

    def once(self, total: Tensor, *, of_tokens: bool) -> Tensor:
        """Return this rank's part of a sum over whole data, which every context rank holds."""
        here = (of_tokens and self.cut_rows) or group_rank(self.context_group) == 0
        return total if here else torch.zeros_like(total)

    @cached_property
    def _fields(self) -> dict[tuple[str, torch.dtype | None], Tensor]:
        return {}

    @cached_property
    def _zeros(self) -> dict[torch.dtype | None, Tensor]:
        return {}


def in_dtype(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    return values if dtype is None or not values.is_floating_point() else values.to(dtype)
