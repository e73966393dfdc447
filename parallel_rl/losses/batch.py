"""What an objective sees of a batch: flat local tokens, safe zeros at masked places, and sums that obey the law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from parallel_rl.groups import group_rank
from parallel_rl.reduce import Metric, ValidCounts, valid_tokens
from parallel_rl.vocab.sampling import sample_keys

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.layout import SequenceLayout
    from parallel_rl.statistics import Statistics
    from parallel_rl.vocab.stats import TokenStats

Alignment = Literal["token", "predictor"]


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """One micro-batch on one rank.

    `batch["advantages"]` is a [B, S] field of the data as [T_local], in the order of the logits: position t speaks of
    the token that it predicts. Masked places hold 0 in every field, in `logprobs` and in `entropy` (with gradient 0),
    so that no objective ever meets what stood there.

    Attributes:
        data: the whole, token-aligned tensors.
        layout: which token each local position holds.
        counts: valid sequences and tokens of the whole step.
        context_group: the group over which a sequence is spread.
        token_stats: of the current policy, flat; None for a loss on a scalar head.
        head: a scalar head's output, [T_local] at the position that holds the token, or [B] pooled; None for a loss on
            log-probs.
        statistics: of the whole step, for the losses that need them.
        shift: whether position t speaks of the token that it predicts, t + 1; False: of token t itself.
        dropped: [T_local] bool, valid tokens that left the mask because a truncated policy does not keep them.
        unfiltered: `token_stats` without the truncation, for a loss that declares `needs_unfiltered`.
        carrier: an exact 0 through which the gradient flows where it was computed before the loss; see `LMHeadInput`.
    """

    data: Mapping[str, Tensor]
    layout: SequenceLayout
    counts: ValidCounts
    context_group: ProcessGroup | None = None
    token_stats: TokenStats | None = None
    head: Tensor | None = None
    statistics: Statistics | None = None
    shift: bool = True
    dropped: Tensor | None = None
    unfiltered: TokenStats | None = None
    carrier: Tensor | None = None

    @property
    def logprobs(self) -> Tensor:
        """[T_local] log π of the token that each position predicts, with gradient."""
        assert self.token_stats is not None, "a loss on a scalar head has no log-probs"
        return self.token_stats.logprobs

    @property
    def unfiltered_logprobs(self) -> Tensor:
        """[T_local] as `logprobs`, of the whole distribution where `logprobs` are of a truncated one."""
        return self.logprobs if self.unfiltered is None else self.unfiltered.logprobs

    @property
    def entropy(self) -> Tensor:
        """[T_local] of the distribution at each position, with gradient; for a loss that declares `needs_entropy`."""
        assert self.has_entropy, "the loss does not declare needs_entropy"
        assert self.token_stats is not None and self.token_stats.entropy is not None
        return self.token_stats.entropy

    @property
    def has_entropy(self) -> bool:
        return self.token_stats is not None and self.token_stats.entropy is not None

    @cached_property
    def valid(self) -> Tensor:
        """[B, S] bool: whole, token-aligned. Column 0 has no predictor; without a shift it needs none."""
        return valid_tokens(self.data, self.shift)

    @cached_property
    def mask(self) -> Tensor:
        """[T_local] bool: positions whose token (the predicted one, with a shift) carries loss."""
        mask = self.layout.shard(self.valid, self.shift, fill=False)
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
        return self.valid.sum(1)

    def __getitem__(self, name: str) -> Tensor:
        return self.field(name)

    def field(self, name: str, alignment: Alignment = "token") -> Tensor:
        """[T_local] a [B, S] field ([B, S, K]: [T_local, K]); "predictor" is for one stored where the prediction is made."""
        if (name, alignment) not in self._fields:
            local = self.layout.shard(self._to_math(self.data[name]), self.shift and alignment == "token")
            self._fields[name, alignment] = torch.where(self.mask.view(-1, *[1] * (local.dim() - 1)), local, 0)
        return self._fields[name, alignment]

    def local(self, name: str) -> Tensor:
        """[T_local, ...] a field that comes in the order of the logits, as it is, masked places included."""
        return self.data[name].flatten(0, 1)

    def _to_math(self, values: Tensor) -> Tensor:
        """In max(float32, the logits' dtype), where the mathematics runs."""
        model = self.head if self.token_stats is None else self.logprobs
        return values if model is None or not values.is_floating_point() else values.to(model.dtype)

    @cached_property
    def _fields(self) -> dict[tuple[str, Alignment], Tensor]:
        return {}

    def per_sequence(self, name: str) -> Tensor:
        """[B] a field of the data with one value a sequence, 0 where the sequence is masked."""
        return torch.where(self.sequence_mask, self._to_math(self.data[name]), 0)

    def random(self, seed: int) -> Tensor:
        """[T_local] float64 uniform on [0, 1), keyed by (seed, sample_ids, position of the token): alike on any layout."""
        ids = self.layout.expand(self.data["sample_ids"])
        keys = sample_keys(seed, ids, self.layout.positions + 1)
        return ((keys >> 11) & ((1 << 53) - 1)).to(torch.float64) / (1 << 53)

    def segment_sum(self, x: Tensor) -> Tensor:
        """[T_local] to [B]: sums over whole sequences' valid tokens; differentiable, one all-reduce over context ranks."""
        return self.layout.segment_sum(torch.where(self.mask, x, 0), self.context_group)

    def segment_mean(self, x: Tensor) -> Tensor:
        """[T_local] to [B]: means over each whole sequence's valid tokens, 0 for a sequence without any."""
        return self.segment_sum(x) / self.tokens_per_sequence.clamp(min=1)

    def segment_max(self, x: Tensor) -> Tensor:
        """[T_local] to [B]: the largest over each whole sequence's valid tokens, −inf without any; no gradient."""
        return self.layout.segment_max(torch.where(self.mask, x.detach(), -torch.inf), self.context_group)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[B] to [T_local]."""
        return self.layout.expand(per_sequence)

    def weighted_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """Σ over local valid tokens of weight[sequence]·x: this rank's share; sums run in float64.

        Args:
            x: [T_local]. weights: [B], see `parallel_rl.reduce.token_weights`.
        """
        return (torch.where(self.mask, x, 0).to(torch.float64) * self.layout.expand(weights)).sum().to(x.dtype)

    def sequence_sum(self, x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        """Σ over valid entries of x / count, divided among the context ranks, which all hold the same x.

        Args:
            x: one value a sequence (or pair). mask: the same shape. count: global count of them.
        """
        return (torch.where(mask, x, 0).sum(dtype=torch.float64) / (count * self.layout.cp_size)).to(x.dtype)

    # Metrics: shares of tokens live on their owner, numbers of whole sequences on context rank 0.

    def token_mean(self, x: Tensor) -> Metric:
        return Metric("share", torch.where(self.mask, x.detach(), 0).sum(dtype=torch.float64) / self.counts.toks)

    def sequence_mean(self, x: Tensor, mask: Tensor | None = None, count: Tensor | None = None) -> Metric:
        mask = self.sequence_mask if mask is None else mask
        count = self.counts.seqs if count is None else count
        return Metric("share", self._owned(torch.where(mask, x.detach(), 0).sum(dtype=torch.float64) / count))

    def count(self, mask: Tensor) -> Metric:
        return Metric("count", self._owned(mask.sum(dtype=torch.float64)))

    def token_min(self, x: Tensor) -> Metric:
        return Metric("min", self._extremum(torch.where(self.mask, x.detach(), torch.inf), torch.inf).amin())

    def token_max(self, x: Tensor) -> Metric:
        return Metric("max", self._extremum(torch.where(self.mask, x.detach(), -torch.inf), -torch.inf).amax())

    @staticmethod
    def _extremum(x: Tensor, nothing: float) -> Tensor:
        """With one entry at least, for a rank without a row."""
        return torch.cat([x, x.new_full((1,), nothing)])

    def _owned(self, value: Tensor) -> Tensor:
        return value if group_rank(self.context_group) == 0 else torch.zeros_like(value)
