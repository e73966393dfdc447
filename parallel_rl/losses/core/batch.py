"""The batch that an objective sees: flat local tokens, safe zeros at masked places, and sums that obey the law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from parallel_rl.counts import ValidCounts
from parallel_rl.losses.core.local_batch import LocalBatch, in_dtype
from parallel_rl.metrics import Metric
from parallel_rl.vocab.sampling import sample_keys

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.statistics import Statistics
    from parallel_rl.vocab.stats import TokenStats


PoolLevel = Literal["token", "turn-mean", "turn-sum", "turn-max", "sequence-mean", "sequence-sum", "sequence-max"]


_NO_PARTS: Mapping[str, ModelOutput] = MappingProxyType({})


class ModelOutput(NamedTuple):
    """The model's output as a loss reads it: token statistics, a scalar head's output, or values made of whole logits.

    Attributes:
        stats: of the current policy, flat.
        head: a scalar head's output, [T_local] at the position that holds the token, or [B] pooled.
        untruncated: `stats` of the whole distribution, for a loss that requires them beside a truncated one's.
        parts: what components of a loss that look at logits read of them, by their names.
    """

    stats: TokenStats | None = None
    head: Tensor | None = None
    untruncated: TokenStats | None = None
    parts: Mapping[str, ModelOutput] = _NO_PARTS

    @property
    def dtype(self) -> torch.dtype:
        """max(float32, the logits' dtype), where the mathematics runs; float64 where the data alone is counted."""
        if self.stats is not None:
            return self.stats.logprobs.dtype
        return torch.float64 if self.head is None else self.head.dtype


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """One micro-batch on one rank, as an objective sees it.

    `batch["advantages"]` is a [B, S] field of the data as [T_local], in the order of the logits: position t speaks of
    the token that it predicts. Masked places hold 0 in every field, in `logprobs` and in `entropy` (with gradient 0),
    so that no objective ever meets what stood there.

        >>> import torch
        >>> from parallel_rl import count_valid, register_objective
        >>> @register_objective("doc_batch", token_fields=("advantages",))
        ... def Weighted(logprobs, batch):
        ...     lengths = batch.expand(batch.segment_sum(torch.ones_like(logprobs)))
        ...     return -batch["advantages"] * logprobs / lengths
        >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
        >>> data["advantages"] = torch.ones(1, 3)
        >>> loss, _ = Weighted()(torch.zeros(1, 3, 4), data, *count_valid(data))
        >>> round(loss.item(), 4)
        0.6931

    Attributes:
        local: data and layout, for a loss that looks at more than this class shows.
        output: read of the model.
    """

    local: LocalBatch
    output: ModelOutput

    @property
    def counts(self) -> ValidCounts:
        """Valid sequences and tokens of the whole step."""
        return self.local.counts

    @property
    def statistics(self) -> Statistics:
        """Statistics of the whole step, for a loss that counts or collects some.

        Raises:
            ValueError: the loss declares none.
        """
        if self.local.statistics is None:
            raise ValueError(
                "the loss reads batch.statistics and declares none; declare count= (from the data alone) or collect= (from the "
                "log-probs too) of register_objective, or counted= or collected= of Requirements"
            )
        return self.local.statistics

    @property
    def samples(self) -> Mapping[str, Tensor]:
        """Samples of the step by name; none for a loss that declares no statistics."""
        return {} if self.local.statistics is None else self.local.statistics.samples

    @property
    def logprobs(self) -> Tensor:
        """[T_local] log π of the token that each position predicts, with gradient."""
        assert self.output.stats is not None, "a loss on a scalar head has no log-probs"
        return self.output.stats.logprobs

    @property
    def entropy(self) -> Tensor:
        """[T_local] of the distribution at each position, with gradient; for a loss that declares it."""
        stats = self.output.stats
        if stats is None or stats.entropy is None:
            raise ValueError(
                "the loss reads batch.entropy and does not declare it; needs_entropy=True of register_objective does, or "
                "entropy=True of Requirements"
            )
        return stats.entropy

    @property
    def has_entropy(self) -> bool:
        """Whether the entropy is there: a call on log-probs may leave it out."""
        return self.output.stats is not None and self.output.stats.entropy is not None

    @property
    def head(self) -> Tensor:
        """[T_local] output of a scalar head at the position that holds the token, or [B] pooled, with gradient."""
        assert self.output.head is not None, "a loss on log-probs has no scalar head"
        return self.output.head

    @property
    def mask(self) -> Tensor:
        """[T_local] bool: positions whose token (the predicted one, with a shift) carries loss."""
        return self.local.mask

    @property
    def valid(self) -> Tensor:
        """[B, S] bool: the same tokens in the order of the data, whole."""
        return self.local.valid

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S): the sequences and the width of the data."""
        return self.local.layout.shape

    @property
    def sequence_mask(self) -> Tensor:
        """[B] bool."""
        return self.local.sequence_mask

    @property
    def tokens_per_sequence(self) -> Tensor:
        """[B] valid tokens of each sequence, over all context ranks."""
        return self.local.tokens_per_sequence

    def __getitem__(self, name: str) -> Tensor:
        """[T_local] a [B, S] field ([B, S, K]: [T_local, K]), 0 at masked places.

        Raises:
            ValueError: a field that the loss does not declare, or one with a value per sequence.
        """
        self.local.check_declared(name, per="token")
        return self.local.field(name, self.output.dtype)

    def in_order(self, rows: Tensor) -> Tensor:
        """[B, S] bool, made of the data, to [T_local] in the order of the logits; False at positions without a token."""
        return self.local.layout.shard(rows, self.local.requirements.shift, fill=False)

    def recorded(self, name: str) -> Tensor:
        """[T_local] float64 of a field [B, S], 0 at masked places, not rounded to the dtype of the logits."""
        self.local.check_declared(name, per="token")
        return self.local.field(name, torch.promote_types(self.local.data[name].dtype, self.output.dtype)).double()

    def has(self, name: str) -> bool:
        """Whether a field is there: one that the loss requires, or an optional one that was given."""
        return name in self.local.requirements.names

    def per_sequence(self, name: str) -> Tensor:
        """[B] a field of the data with one value per sequence, 0 where the sequence is masked."""
        self.local.check_declared(name, per="sequence")
        return torch.where(self.sequence_mask, in_dtype(self.local.data[name], self.output.dtype), 0)

    def random(self, seed: int) -> Tensor:
        """[T_local] float64 uniform on [0, 1), keyed by (seed, sample_ids, position of the token): alike on any layout."""
        layout = self.local.layout
        keys = sample_keys(seed, layout.expand(self.local.data["sample_ids"]), layout.positions + 1)
        return ((keys >> 11) & ((1 << 53) - 1)).to(torch.float64) / (1 << 53)

    def segment_sum(self, x: Tensor) -> Tensor:
        """[T_local] to [B]: sums over whole sequences' valid tokens; differentiable, one all-reduce over context ranks."""
        return self.local.layout.segment_sum(self.local.masked(x, self.output.dtype), self.local.context_group)

    def segment_mean(self, x: Tensor) -> Tensor:
        """[T_local] to [B]: means over each whole sequence's valid tokens, 0 for a sequence without any."""
        return self.segment_sum(x) / self.tokens_per_sequence.clamp(min=1)

    def segment_max(self, x: Tensor) -> Tensor:
        """[T_local] to [B]: the largest over each whole sequence's valid tokens, −inf without any; no gradient."""
        x = torch.where(self.mask, x.detach(), -torch.inf)
        return self.local.layout.segment_max(x, self.local.context_group)

    def turn_sum(self, x: Tensor) -> Tensor:
        """[T_local] to [T_local]: at each token the sum over its turn's valid tokens; for a loss that declares segment_ids.

        Differentiable; right where context ranks or packing cut a turn, with one all-reduce.
        """
        return self.local.turns.sum(self.local.masked(x, self.output.dtype), self.local.context_group)

    def turn_mean(self, x: Tensor) -> Tensor:
        """[T_local] to [T_local]: at each token the mean over its turn's valid tokens."""
        return self.turn_sum(x) / self.local.tokens_per_turn.clamp(min=1)

    def turn_max(self, x: Tensor) -> Tensor:
        """[T_local] to [T_local]: at each token the largest over its turn's valid tokens; no gradient."""
        return self.local.turns.max(torch.where(self.mask, x.detach(), -torch.inf), self.local.context_group)

    def pooled(self, x: Tensor, level: PoolLevel) -> Tensor:
        """[T_local] to [T_local]: x itself ("token"), or at each token what is made of its turn or sequence."""
        if level == "token":
            return x
        if level == "turn-sum":
            return self.turn_sum(x)
        if level == "turn-mean":
            return self.turn_mean(x)
        if level == "turn-max":
            return self.turn_max(x)
        if level == "sequence-sum":
            return self.expand(self.segment_sum(x))
        return self.expand(self.segment_mean(x) if level == "sequence-mean" else self.segment_max(x))

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[B] to [T_local]: each sequence's value at its tokens."""
        return self.local.layout.expand(per_sequence)

    def weighted_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """Σ over local valid tokens of weight[sequence]·x: this rank's share; sums run in float64.

        Args:
            x: [T_local], or [K, T_local] for K sums. weights: [B], see `parallel_rl.counts.token_weights`.
        """
        return self.token_sum(x, self.expand(weights))

    def token_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """Σ over local valid tokens of weight·x: this rank's share; sums run in float64.

        Args:
            x: [T_local], or [K, T_local] for K sums. weights: [T_local]; the data's token weights multiply them.
        """
        scaled = weights if self.local.scale is None else weights * self.local.scale
        return (self.local.masked(x, self.output.dtype).to(torch.float64) * scaled).sum(-1).to(x.dtype)

    def sequence_sum(self, x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        """Σ over valid entries of x / count, divided among the context ranks, which all hold the same x.

        Args:
            x: one value per sequence (or pair). mask: the same shape. count: global count of them.
        """
        return (torch.where(mask, x, 0).sum(dtype=torch.float64) / (count * self.local.layout.cp_size)).to(x.dtype)

    def token_mean(self, x: Tensor) -> Metric:
        """Metric: the mean of [T_local] over all valid tokens of the step; its `value` is this rank's share."""
        wide = torch.promote_types(x.dtype, self.output.dtype)
        mean = self.local.masked(x.detach().to(wide)[None], wide).sum(-1, dtype=torch.float64)
        return Metric("share", (mean / self.counts.toks)[0], per=self.local.token_unit)
