"""The batch of an objective: flat local tokens, 0 at masked places, and sums that obey the law."""

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
    """Model output as a loss reads it: token statistics, a scalar head, or values of whole logits.

    Attributes:
        stats: of the current policy, flat.
        head: a scalar head's output, [T_local] at the position that holds the token, or [B] pooled.
        untruncated: `stats` of the whole distribution, if the loss needs them as well as a truncated policy's.
        parts: outputs of the components that read logits, by name.
    """

    stats: TokenStats | None = None
    head: Tensor | None = None
    untruncated: TokenStats | None = None
    parts: Mapping[str, ModelOutput] = _NO_PARTS

    @property
    def dtype(self) -> torch.dtype:
        """Return max(float32, the logits' dtype), where mathematics runs; float64 if only data is counted."""
        if self.stats is not None:
            return self.stats.logprobs.dtype
        return torch.float64 if self.head is None else self.head.dtype


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """One micro-batch on one rank, as an objective receives it.

    `batch["advantages"]` is a [B, S] field as [T_local] in the order of the logits: position t holds the value of the token
    that it predicts. Fields, `logprobs` and `entropy` are 0 (with gradient 0) at masked places.

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
        local: data and layout, for losses that need more than this class offers.
        output: of the model.
    """

    local: LocalBatch
    output: ModelOutput

    @property
    def counts(self) -> ValidCounts:
        """Return the valid sequences and tokens of the whole step."""
        return self.local.counts

    @property
    def statistics(self) -> Statistics:
        """Return the statistics of the whole step; ValueError if the loss declares none."""
        if self.local.statistics is None:
            raise ValueError(
                "the loss reads batch.statistics and declares none; declare count= (from the data alone) or collect= (from the "
                "log-probs too) of register_objective, or counted= or collected= of Requirements"
            )
        return self.local.statistics

    @property
    def samples(self) -> Mapping[str, Tensor]:
        """Return the samples of the step by name; empty without statistics."""
        return {} if self.local.statistics is None else self.local.statistics.samples

    @property
    def logprobs(self) -> Tensor:
        """Return [T_local] log π of the token that each position predicts, with gradient."""
        assert self.output.stats is not None, "a loss on a scalar head has no log-probs"
        return self.output.stats.logprobs

    @property
    def entropy(self) -> Tensor:
        """Return [T_local] entropy at each position, with gradient; the loss must declare it."""
        stats = self.output.stats
        if stats is None or stats.entropy is None:
            raise ValueError(
                "the loss reads batch.entropy and does not declare it; needs_entropy=True of register_objective does, or "
                "entropy=True of Requirements"
            )
        return stats.entropy

    @property
    def has_entropy(self) -> bool:
        """Return whether the entropy is known; a call on log-probs may omit it."""
        return self.output.stats is not None and self.output.stats.entropy is not None

    @property
    def head(self) -> Tensor:
        """Return a scalar head's output, [T_local] at the token's position or [B] pooled, with gradient."""
        assert self.output.head is not None, "a loss on log-probs has no scalar head"
        return self.output.head

    @property
    def mask(self) -> Tensor:
        """Return [T_local] bool: positions whose (with a shift predicted) token contributes to the loss."""
        return self.local.mask

    @property
    def valid(self) -> Tensor:
        """Return [B, S] bool: the same tokens in the order of the data."""
        return self.local.valid

    @property
    def shape(self) -> tuple[int, int]:
        """Return (B, S), the shape of the data."""
        return self.local.layout.shape

    @property
    def sequence_mask(self) -> Tensor:
        """Return [B] bool: the valid sequences."""
        return self.local.sequence_mask

    @property
    def tokens_per_sequence(self) -> Tensor:
        """Return [B] valid tokens of each sequence, over all context ranks."""
        return self.local.tokens_per_sequence

    def __getitem__(self, name: str) -> Tensor:
        """Return a declared field [B, S(, K)] as [T_local(, K)], 0 at masked places; ValueError for others."""
        self.local.check_declared(name, per="token")
        return self.local.field(name, self.output.dtype)

    def in_order(self, rows: Tensor) -> Tensor:
        """Put bool [B, S] of the data in the order of the logits, [T_local]; False where there is no token."""
        return self.local.layout.shard(rows, self.local.requirements.shift, fill=False)

    def recorded(self, name: str) -> Tensor:
        """Return a field [B, S] as [T_local] float64, 0 at masked places, not rounded to the logits' dtype."""
        self.local.check_declared(name, per="token")
        return self.local.field(name, torch.promote_types(self.local.data[name].dtype, self.output.dtype)).double()

    def has(self, name: str) -> bool:
        """Return whether the call has a field: a required one, or an optional one that was passed."""
        return name in self.local.requirements.names

    def per_sequence(self, name: str) -> Tensor:
        """Return a [B] field of the data, 0 where the sequence is masked."""
        self.local.check_declared(name, per="sequence")
        return torch.where(self.sequence_mask, in_dtype(self.local.data[name], self.output.dtype), 0)

    def random(self, seed: int) -> Tensor:
        """Draw [T_local] float64 from [0, 1) by (seed, sample_ids, token position), alike on any layout."""
        layout = self.local.layout
        keys = sample_keys(seed, layout.expand(self.local.data["sample_ids"]), layout.positions + 1)
        return ((keys >> 11) & ((1 << 53) - 1)).to(torch.float64) / (1 << 53)

    def segment_sum(self, x: Tensor) -> Tensor:
        """Sum whole sequences' valid tokens to [B]; differentiable, one all-reduce over context ranks."""
        return self.local.layout.segment_sum(self.local.masked(x, self.output.dtype), self.local.context_group)

    def segment_mean(self, x: Tensor) -> Tensor:
        """Average [T_local] over each whole sequence's valid tokens to [B], 0 for a sequence without any."""
        return self.segment_sum(x) / self.tokens_per_sequence.clamp(min=1)

    def segment_max(self, x: Tensor) -> Tensor:
        """Return the maximum [B] over whole sequences' valid tokens, −inf without any; no gradient."""
        x = torch.where(self.mask, x.detach(), -torch.inf)
        return self.local.layout.segment_max(x, self.local.context_group)

    def turn_sum(self, x: Tensor) -> Tensor:
        """Sum valid tokens per turn, [T_local] to [T_local]; differentiable, one all-reduce, exact if cut."""
        return self.local.turns.sum(self.local.masked(x, self.output.dtype), self.local.context_group)

    def turn_mean(self, x: Tensor) -> Tensor:
        """Average [T_local] over the valid tokens of each token's turn, as [T_local]."""
        return self.turn_sum(x) / self.local.tokens_per_turn.clamp(min=1)

    def turn_max(self, x: Tensor) -> Tensor:
        """Take the maximum of [T_local] over the valid tokens of each token's turn; no gradient."""
        return self.local.turns.max(torch.where(self.mask, x.detach(), -torch.inf), self.local.context_group)

    def pooled(self, x: Tensor, level: PoolLevel) -> Tensor:
        """Pool [T_local] per turn or sequence and repeat it at each token; "token" returns x."""
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
        """Expand [B] to [T_local]: each sequence's value at its tokens."""
        return self.local.layout.expand(per_sequence)

    def weighted_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum weight[sequence]·x over local valid tokens in float64: this rank's part.

        x: [T_local], or [K, T_local] for K sums. weights: [B], see `parallel_rl.counts.token_weights`.
        """
        return self.token_sum(x, self.expand(weights))

    def token_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum weight·x over local valid tokens in float64: this rank's part.

        x: [T_local], or [K, T_local] for K sums. weights: [T_local]; the data's token weights multiply them.
        """
        scaled = weights if self.local.scale is None else weights * self.local.scale
        return (self.local.masked(x, self.output.dtype).to(torch.float64) * scaled).sum(-1).to(x.dtype)

    def sequence_sum(self, x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        """Sum x / count over valid entries, divided among the context ranks, which all hold the same x.

        x, mask: one value per sequence or pair. count: their global number.
        """
        return (torch.where(mask, x, 0).sum(dtype=torch.float64) / (count * self.local.layout.cp_size)).to(x.dtype)

    def token_mean(self, x: Tensor) -> Metric:
        """Make a metric: the mean of [T_local] over the step's valid tokens; `value` is this rank's part."""
        wide = torch.promote_types(x.dtype, self.output.dtype)
        mean = self.local.masked(x.detach().to(wide)[None], wide).sum(-1, dtype=torch.float64)
        return Metric("share", (mean / self.counts.toks)[0], per=self.local.token_unit)
