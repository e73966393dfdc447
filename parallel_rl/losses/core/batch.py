"""What an objective sees of a batch: flat local tokens, safe zeros at masked places, and sums that obey the law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from parallel_rl.counts import ValidCounts, valid_tokens
from parallel_rl.groups import group_rank
from parallel_rl.metrics import Metric
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
        untruncated: `token_stats` without the truncation, for a loss that declares `needs_untruncated`.
        carrier: an exact 0 through which the gradient flows where it was computed before the loss; see `LMHeadInput`.
        together: [B, S] token-aligned fields of floats that the loss reads; they are taken with one look-up.
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
    untruncated: TokenStats | None = None
    carrier: Tensor | None = None
    together: tuple[str, ...] = ()

    def sharing(self, other: TokenBatch) -> TokenBatch:
        """Itself, with the masks and fields that `other` has found already: of the same data, with the same tokens dropped."""
        for name in ("valid", "mask", "sequence_mask", "tokens_per_sequence", "_fields"):
            if name in other.__dict__:
                self.__dict__[name] = other.__dict__[name]
        return self

    @property
    def logprobs(self) -> Tensor:
        """[T_local] log π of the token that each position predicts, with gradient."""
        assert self.token_stats is not None, "a loss on a scalar head has no log-probs"
        return self.token_stats.logprobs

    @property
    def untruncated_logprobs(self) -> Tensor:
        """[T_local] as `logprobs`, of the whole distribution where `logprobs` are of a truncated one."""
        return self.logprobs if self.untruncated is None else self.untruncated.logprobs

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
        _, here = self.layout.places(self.shift)
        mask = self.layout.take(self.valid, self.shift) & here
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
        shift = self.shift and alignment == "token"
        key = name, shift, self._math_dtype
        if key not in self._fields:
            if shift == self.shift and name in self.together:
                stacked = torch.stack([self._to_math(self.data[each]) for each in self.together]).flatten(1)
                found = self.masked(stacked.index_select(1, self.layout.places(shift)[0]))
                self._fields.update({(each, *key[1:]): x for each, x in zip(self.together, found, strict=True)})
            else:
                local = self.layout.take(self._to_math(self.data[name]), shift)
                self._fields[key] = torch.where(self.mask.view(-1, *[1] * (local.dim() - 1)), local, 0)
        return self._fields[key]

    def masked(self, x: Tensor) -> Tensor:
        """[T_local], or K quantities [K, T_local]: x, and 0 at masked places."""
        return torch.where(self.mask, x, self.zero)

    @cached_property
    def zero(self) -> Tensor:
        """A scalar in the dtype of the mathematics; a Python number would become one anew in each `where`."""
        return torch.zeros((), dtype=self._math_dtype, device=self.mask.device)

    def local(self, name: str) -> Tensor:
        """[T_local, ...] a field that comes in the order of the logits, as it is, masked places included."""
        return self.data[name].flatten(0, 1)

    @property
    def _math_dtype(self) -> torch.dtype | None:
        """max(float32, the logits' dtype), where the mathematics runs; None before the model's output is read."""
        model = self.head if self.token_stats is None else self.logprobs
        return None if model is None else model.dtype

    def _to_math(self, values: Tensor) -> Tensor:
        dtype = self._math_dtype
        return values if dtype is None or not values.is_floating_point() else values.to(dtype)

    @cached_property
    def _fields(self) -> dict[tuple[str, bool, torch.dtype | None], Tensor]:
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
        return self.layout.segment_sum(self.masked(x), self.context_group)

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
            x: [T_local], or [K, T_local] for K sums. weights: [B], see `parallel_rl.counts.token_weights`.
        """
        return (self.masked(x).to(torch.float64) * self.layout.expand(weights)).sum(-1).to(x.dtype)

    def sequence_sum(self, x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        """Σ over valid entries of x / count, divided among the context ranks, which all hold the same x.

        Args:
            x: one value a sequence (or pair). mask: the same shape. count: global count of them.
        """
        return (torch.where(mask, x, 0).sum(dtype=torch.float64) / (count * self.layout.cp_size)).to(x.dtype)

    # Metrics: shares of tokens live on their owner, numbers of whole sequences on context rank 0.

    def token_mean(self, x: Tensor) -> Metric:
        """[T_local] to its mean over the valid tokens of the step."""
        return self.token_means({"": x})[""]

    def token_means(self, values: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Name → [T_local], summed together."""
        stacked = torch.stack([x.detach().to(self.zero.dtype) for x in values.values()])
        means = self.masked(stacked).sum(-1, dtype=torch.float64) / self.counts.toks
        return {name: Metric("share", mean) for name, mean in zip(values, means.unbind(), strict=True)}

    def sequence_mean(self, x: Tensor, mask: Tensor | None = None, count: Tensor | None = None) -> Metric:
        """One value a sequence (or, with their mask and global count, a pair) to its mean over the step."""
        mask = self.sequence_mask if mask is None else mask
        count = self.counts.seqs if count is None else count
        return Metric("share", self._owned(torch.where(mask, x.detach(), 0).sum(dtype=torch.float64) / count))

    def count(self, mask: Tensor) -> Metric:
        """The number of True entries of a mask of sequences, over the step."""
        return Metric("count", self._owned(mask.sum(dtype=torch.float64)))

    def token_ranges(self, values: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Name → [T_local]; the smallest is `name_min`, the largest `name_max`."""
        stacked = torch.stack([x.detach() for x in values.values()])
        if not stacked.shape[1]:  # a rank without a row
            least, most = (stacked.new_full((len(values),), nothing) for nothing in (torch.inf, -torch.inf))
        else:
            least = torch.where(self.mask, stacked, torch.inf).amin(1)
            most = torch.where(self.mask, stacked, -torch.inf).amax(1)
        metrics = {f"{name}_min": Metric("min", x) for name, x in zip(values, least.unbind(), strict=True)}
        return metrics | {f"{name}_max": Metric("max", x) for name, x in zip(values, most.unbind(), strict=True)}

    def _owned(self, value: Tensor) -> Tensor:
        return value if group_rank(self.context_group) == 0 else torch.zeros_like(value)
