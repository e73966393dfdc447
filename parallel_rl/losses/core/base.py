"""The call that every loss shares: checks, layout, token statistics, then the objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks, shape_facts
from parallel_rl.config.strict import configure
from parallel_rl.counts import ValidCounts, valid_tokens
from parallel_rl.groups import check_rank
from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.checks import Fields, check_counts, check_data, check_lengths, check_statistics
from parallel_rl.losses.core.from_hidden_states import check_fused_head, project
from parallel_rl.losses.core.options import PackedSequences, VocabOptions, layout_of_logits
from parallel_rl.losses.core.truncated_policy import read_truncated_head, with_dropped
from parallel_rl.metrics import Metrics
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import Backend
from parallel_rl.vocab.linear.lm_head import LMHeadInput, split_output
from parallel_rl.vocab.stats import check_logits, check_targets, stats_of_shard
from parallel_rl.vocab.truncated_stats import check_kept_ids
from parallel_rl.vocab.truncation import Truncation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


ConfigT = TypeVar("ConfigT")


class LossFn(ABC, Generic[ConfigT]):
    """A loss on vocab-parallel logits that returns this rank's share.

        loss, metrics = loss_fn(next_token_logits, data, global_valid_seqs, global_valid_toks,
                                vocab_parallel_rank, vocab_parallel_group, context_parallel_group)

    Σ over context ranks, data ranks and micro-batches of the loss, of its gradients and of its metrics (through
    `reduce_metrics`) is what one process with the whole global batch would get. Equal on tensor ranks.

    Args of the constructor:
        config: the loss's config dataclass, a mapping of its keys, or None for its defaults.
        vocab_size: true size V; columns beyond it are padding. None: the shards hold no padding.
        vocab_start: first column's id of this rank, for a split that is neither even nor `torch.chunk`'s.
        cp_layout: "zigzag" (2·cp chunks a sequence, Megatron and Transformer Engine) or "contiguous".
        temperature: the policy is softmax(logits / temperature).
        consume_logits: the backward writes the gradient over the logits.
        backend: of the token statistics, see `token_stats`.
        top_k, top_p: of the sampler, for a loss on a policy that is truncated as it was when the tokens were drawn. A token
            that the current policy does not keep, or whose prev_logprobs or generation_logprobs is −inf, leaves the mask;
            it stays in the step's denominators, and the metric dropped_tokens counts it. Log-probs that are compared with
            an untruncated reference are untruncated.
        kept_sets: the words that the sampler kept are in the field kept_ids [B, S, K], filled up with −1; instead of the two.
    """

    config_class: type[ConfigT]
    #: fields [B, S] of `data` that the loss reads, beside input_ids, token_mask and sample_mask
    token_fields: tuple[str, ...] = ()
    #: those of them that are stored where the prediction is made, one column before the token
    predictor_fields: tuple[str, ...] = ()
    #: those of them with several values a token: [B, S, K]
    wide_fields: tuple[str, ...] = ()
    #: fields [B]
    sequence_fields: tuple[str, ...] = ()
    #: fields in the order of the logits, [B, S/cp, ...] or packed [1, T/cp, ...], on this rank only
    local_fields: tuple[str, ...] = ()
    #: those of all of these that hold integers or bools; the others are floating point
    integer_fields: tuple[str, ...] = ()
    #: whether it reads one output a position (or a row) instead of logits
    scalar_head: bool = False
    #: whether rows come as (even, odd) pairs
    paired: bool = False
    #: whether the loss needs `statistics` of the whole step
    needs_statistics: bool = False
    #: whether the log-probs may be those of a truncated policy (top_k, top_p, kept_sets)
    truncatable: bool = False
    #: whether it reads `batch.untruncated_logprobs` beside them
    needs_untruncated: bool = False
    #: whether the entropy of the policy is computed
    needs_entropy: bool = False
    #: whether the loss is a sum over tokens of terms that depend on the log-prob and entropy of their own token alone, all else
    #: (data, `statistics`, counts) being constant: the fused head may then compute gradients in forward
    token_separable: bool = False
    #: whether the output at position t speaks of token t + 1, which it predicts; False: of token t itself
    shift: bool = True

    def __init__(
        self,
        config: ConfigT | Mapping | None = None,
        *,
        vocab_size: int | None = None,
        vocab_start: int | None = None,
        cp_layout: CPLayout = "zigzag",
        temperature: float = 1.0,
        consume_logits: bool = False,
        backend: Backend = "auto",
        top_k: int | None = None,
        top_p: float | None = None,
        kept_sets: bool = False,
    ) -> None:
        self.config = configure(self.config_class, config)
        truncation = Truncation(top_k, top_p, kept_sets)
        if truncation and not self.truncatable:
            raise ValueError(
                f"{type(self).__name__} is not a loss on a sampler's policy, so {truncation} does not fit it"
            )
        self.options = VocabOptions(
            vocab_size, vocab_start, cp_layout, temperature, consume_logits, backend, truncation
        )

    @classmethod
    def reads_log_probs(cls) -> bool:
        """Whether log-probs and entropy are all that it reads of the model; from an `LMHeadInput` it needs no whole logits."""
        return not cls.scalar_head and cls._read_head is LossFn._read_head

    @abstractmethod
    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """The share of the loss and its metrics, from flat local tokens."""

    def collect_from(self, batch: TokenBatch) -> Statistics:
        """This rank's part of the statistics of the step.

        Raises:
            ValueError: a loss that needs none.
        """
        raise ValueError(f"{type(self).__name__} in this configuration needs no statistics of the step")

    @property
    def on_policy(self) -> bool:
        """Whether it is right only for the policy that drew the samples, so that a second update on them is refused."""
        return False

    @property
    def kl_in_reward(self) -> bool:
        """Whether it leaves the KL to the reference out because the advantages hold it already."""
        return False

    def after_step(self) -> None:
        """Move on by one optimizer step; the trainer calls it after each. A loss with a schedule overrides it."""

    def state_dict(self) -> dict[str, float]:
        """The numbers that change over the steps, for a checkpoint; equal on all ranks, empty without a state."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from where `state_dict` was taken.

        Raises:
            ValueError: a state that this loss does not have.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got {dict(state)}")

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
        packed_sequences: PackedSequences | None = None,
    ) -> tuple[Tensor, Metrics]:
        """This rank's share of the loss, and its metrics.

        Args:
            next_token_logits: [B, S/cp, V/tp]; packed (through `SequencePackingLossWrapper`) [1, T/cp, V/tp]. Or an
                `LMHeadInput`, hidden states and the head's weight: the same loss, logits never whole.
            data: whole, token-aligned tensors: input_ids [B, S], token_mask [B, S], sample_mask [B], and the loss's
                own fields.
            global_valid_seqs, global_valid_toks: of the whole step, see `count_valid`.
            vocab_parallel_rank: this rank's place in `vocab_parallel_group`, checked against it.
            vocab_parallel_group, context_parallel_group: None is a group of one.
            statistics: of the whole step, for a loss that `needs_statistics`.
            packed_sequences: how a packed row is laid out; `SequencePackingLossWrapper` gives it.

        Raises:
            ValueError: input that does not fit, on all ranks of both groups, see `set_validation`.
        """
        batch = self._batch(
            next_token_logits, data, global_valid_seqs, global_valid_toks,
            vocab_parallel_rank, vocab_parallel_group, context_parallel_group, statistics, packed_sequences,
        )  # fmt: skip
        loss, metrics = self.compute(batch)
        if batch.dropped is not None:
            metrics = with_dropped(metrics, batch.dropped)
        return loss if batch.carrier is None else loss + batch.carrier, metrics

    @torch.no_grad()
    def collect(
        self,
        next_token_logits: Tensor | LMHeadInput,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        *,
        packed_sequences: PackedSequences | None = None,
    ) -> Statistics:
        """This rank's part of the statistics of the step, from the loss's call; `+` joins micro-batches, then `reduce`.

        Raises:
            ValueError: a loss that needs none; input that does not fit, on all ranks of both groups.
        """
        if not self.needs_statistics:
            raise ValueError(f"{type(self).__name__} in this configuration needs no statistics of the step")
        return self.collect_from(
            self._batch(
                next_token_logits, data, global_valid_seqs, global_valid_toks,
                vocab_parallel_rank, vocab_parallel_group, context_parallel_group, Statistics({}), packed_sequences,
            )
        )  # fmt: skip

    def _batch(
        self,
        output: Tensor | LMHeadInput,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        rank: int | None,
        tensor_group: ProcessGroup | None,
        context_group: ProcessGroup | None,
        statistics: Statistics | None,
        packed_sequences: PackedSequences | None,
    ) -> TokenBatch:
        head, logits = split_output(output, tensor_group)
        data = self._complete(logits, data)

        def check() -> SequenceLayout:
            if head is not None:
                check_fused_head(self, head, tensor_group)
            check_statistics(type(self).__name__, self.needs_statistics, statistics)
            check_rank(rank, tensor_group)
            check_counts(global_valid_seqs, global_valid_toks)
            rows, width = check_data(data, self._fields, logits)
            if self.paired and rows % 2:
                raise ValueError(
                    f"preference pairs are (even, odd) rows, so their number must be even; got {rows} rows"
                )
            layout = self._layout(logits, rows, width, context_group, packed_sequences)
            if packed_sequences is not None:
                check_lengths(data, layout)
            self._check_head(logits, data, tensor_group)
            if head is not None:
                head.check_rows(layout.shard(valid_tokens(data), fill=False), tensor_group)
            return layout

        same = shape_facts(logits, self.options.vocab_size)
        layout = raise_on_all_ranks(check, [tensor_group, context_group], logits, same)
        given = (torch.as_tensor(n) for n in (global_valid_seqs, global_valid_toks))
        counts = ValidCounts(*(n.to(logits.device, non_blocking=True) for n in given))
        batch = TokenBatch(
            data, layout, counts, context_group, statistics=statistics, shift=self.shift, together=self._together
        )
        return (
            self._read_head(batch, logits, tensor_group) if head is None else project(self, batch, head, tensor_group)
        )

    @property
    def _fields(self) -> Fields:
        kept = ("kept_ids",) if self.options.truncation.kept_sets else ()
        return Fields(
            self.token_fields + kept,
            self.sequence_fields,
            self.local_fields,
            self.predictor_fields,
            self.wide_fields + kept,
            self.integer_fields + kept,
            self.shift,
        )

    @property
    def _together(self) -> tuple[str, ...]:
        apart = (*self.predictor_fields, *self.wide_fields, *self.integer_fields)
        return tuple(name for name in self.token_fields if name not in apart)

    def _complete(self, logits: Tensor, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The data with fields that this loss can do without."""
        return data

    def _layout(
        self,
        logits: Tensor,
        rows: int,
        width: int,
        context_group: ProcessGroup | None,
        packed_sequences: PackedSequences | None,
    ) -> SequenceLayout:
        return layout_of_logits(logits, rows, width, context_group, packed_sequences, self.options.cp_layout)

    def _check_head(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        options = self.options
        check_logits(logits, options.consume_logits, options.backend)
        shard = options.shard(logits.shape[-1], tensor_group)
        if checks_values(data["input_ids"]):
            check_targets(torch.where(valid_tokens(data), data["input_ids"], 0), shard.vocab_size, ignore_index=None)
        if options.truncation.kept_sets:
            check_kept_ids(data["kept_ids"], valid_tokens(data), shard.vocab_size)

    def _rows_read(self, batch: TokenBatch) -> Tensor:
        """[T_local] bool: the positions whose output matters."""
        return batch.mask

    def _read_head(self, batch: TokenBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        """The batch with what the objective needs of the model's output."""
        options = self.options
        if options.truncation:
            return read_truncated_head(self, batch, logits, tensor_group)
        shard = options.shard(logits.shape[-1], tensor_group, entropy=self.needs_entropy)
        targets = batch.layout.take(batch.data["input_ids"])
        stats = stats_of_shard(logits.flatten(0, -2), targets, batch.mask, shard)
        return replace(batch, token_stats=stats).sharing(batch)
