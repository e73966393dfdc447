"""Base of the losses: checks, layout, token statistics, then the objective."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from parallel_rl.config.strict import configure
from parallel_rl.counts import ValidCounts
from parallel_rl.groups import check_rank
from parallel_rl.labels import is_shifted, with_labels
from parallel_rl.layout import CPLayout, SequenceLayout, valid_tokens
from parallel_rl.losses.core.aggregation import count_units
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.call import LossCall, share_of
from parallel_rl.losses.core.checks import (
    check_counts,
    check_data,
    check_lengths,
    check_on_all_ranks,
    check_predicts,
    check_statistics,
    check_values,
)
from parallel_rl.losses.core.counted import count_step
from parallel_rl.losses.core.dtensor_call import on_shard
from parallel_rl.losses.core.from_hidden_states import check_lm_head, project
from parallel_rl.losses.core.from_logprobs import LogProbLossFunction
from parallel_rl.losses.core.local_batch import LocalBatch
from parallel_rl.losses.core.one_row import check_tree, for_each_token, head_of_tokens, read_stats, rows_of_tokens
from parallel_rl.losses.core.options import Temperature, VocabOptions
from parallel_rl.losses.core.recorded import RecordedCheck
from parallel_rl.losses.core.requirements import WEIGHTS, Requirements
from parallel_rl.losses.core.token_weights import count_weights, weighted
from parallel_rl.losses.core.trained import TrainedLoss
from parallel_rl.losses.core.truncated_policy import read_truncated_policy, with_dropped
from parallel_rl.metrics import Metrics
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.dtensor import is_dtensor
from parallel_rl.vocab.linear.lm_head import LMHeadInput, split_output
from parallel_rl.vocab.linear.logits import whole_logits
from parallel_rl.vocab.stats import check_logits, check_targets
from parallel_rl.vocab.truncated_stats import check_kept_ids
from parallel_rl.vocab.truncation import Truncation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from parallel_rl.vocab.backends.choice import Backend

ConfigT = TypeVar("ConfigT")


class LossFn(TrainedLoss, LogProbLossFunction, Generic[ConfigT]):
    """A loss on vocab-parallel logits that returns this rank's share.

        loss, metrics = loss_fn(next_token_logits, data, global_valid_seqs, global_valid_toks,
                                vocab_parallel_rank, vocab_parallel_group, context_parallel_group)

    Σ over context ranks, data ranks and micro-batches of the loss, of its gradients and of its metrics (through
    `reduce_metrics`) is what one process with the whole global batch would get. Equal on tensor ranks.

    Args of the constructor:
        config: the loss's config dataclass, a mapping of its keys, or None for its defaults.
        vocab_size: true size V; columns beyond it are padding. None: the shards hold no padding.
        vocab_start: id of this rank's first column, for a split that is neither even nor `torch.chunk`'s.
        cp_layout: "zigzag" (2·cp chunks a sequence, Megatron and Transformer Engine) or "contiguous".
        temperature: the policy is softmax(logits / temperature); "per-sample" reads `data["temperature"]` [B], if prompts or
            samplers have their own.
        logit_scale: s, if the logits given are z and the model's are s·z (Cohere's logit_scale; Granite's
            1 / logits_scaling); an `LMHeadInput` has its own.
        consume_logits: the backward writes the gradient over the logits.
        backend: of the token statistics, see `token_stats`.
        top_k, top_p: the sampler's truncation; the loss scores the policy truncated the same way. A token
            that the current policy does not keep, or whose prev_logprobs or generation_logprobs is −inf, is masked; it
            still counts in the step's denominators, and in the metric dropped_tokens. Log-probs that are compared with
            an untruncated reference are untruncated.
        kept_sets: replay the sampler's kept token ids from `data["kept_ids"]` [B, S, K], padded with −1; excludes top_k and
            top_p.

    >>> import torch
    >>> from parallel_rl import LossFn, Metrics, count_valid
    >>> from parallel_rl.losses import NoConfig, Requirements
    >>> class Certainty(LossFn[NoConfig]):
    ...     config_class = NoConfig
    ...     requirements = Requirements(entropy=True, token_separable=True)
    ...     def compute(self, batch):
    ...         return batch.weighted_sum(batch.entropy, 1 / batch.counts.toks.expand(1)), Metrics({})
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> loss, _ = Certainty()(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    1.3863
    """

    config_class: type[ConfigT]

    def __init__(
        self,
        config: ConfigT | Mapping | None = None,
        *,
        vocab_size: int | None = None,
        vocab_start: int | None = None,
        cp_layout: CPLayout = "zigzag",
        temperature: Temperature = 1.0,
        consume_logits: bool = False,
        backend: Backend = "auto",
        top_k: int | None = None,
        top_p: float | None = None,
        kept_sets: bool = False,
        logit_scale: float = 1.0,
    ) -> None:
        self.config = configure(self.config_class, config)
        self.recorded_check = RecordedCheck()
        truncation = Truncation(top_k, top_p, kept_sets)
        self.options = VocabOptions(
            vocab_size, vocab_start, cp_layout, temperature, consume_logits, backend, truncation, logit_scale
        )
        if truncation and not self.requirements.truncatable:
            raise ValueError(
                f"{type(self).__name__} is not a loss on a sampler's policy, so {truncation} does not fit it"
            )

    @cached_property
    def requirements(self) -> Requirements:
        """Fields that the loss reads and properties that it claims, from its config; by default log-probs and no field."""
        return Requirements()

    @abstractmethod
    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """The share of the loss and its metrics, from flat local tokens."""

    def objective(self, batch: TokenBatch) -> Tensor:
        """The share of the loss alone, of which gradients are taken in forward; a loss with many metrics leaves them out."""
        return self.compute(batch)[0]

    def count_from(self, batch: TokenBatch) -> Statistics:
        """Count what a micro-batch's data alone adds to the statistics of the step, for a loss that requires `counted`.

        Args:
            batch: whole on this rank, with float64 fields, without any output of the model; its counts are 1. Its token
                weights, and the units of an aggregation, are counted already.
        """
        return Statistics({})

    def collect_from(self, batch: TokenBatch) -> Statistics:
        """Collect this rank's part of the statistics that the model's output gives, for a loss that requires `collected`."""
        raise NotImplementedError(f"{type(self).__name__} requires `collected`, but has no collect_from")

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        if is_dtensor(call.output):
            call, options = on_shard(call, self.options)
            return self._with_options(options).run(call)
        batch, carrier = self._read(call)
        self.recorded_check(batch, may_wait=call.may_wait)
        loss, metrics = self.compute(batch)
        metrics = with_dropped(metrics, batch.local.dropped)
        if call.observe is not None:
            call.observe(batch, loss.detach(), metrics)
        return share_of(loss, carrier), metrics

    @torch.no_grad()
    def count(
        self,
        batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        data_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        if not self.requirements.counted:
            return Statistics({})

        def count(local: LocalBatch) -> Statistics:
            return self._count_local(self._narrowed(local))

        given = [with_labels(data) for data in ([batches] if isinstance(batches, Mapping) else batches)]
        needs = self.requirements.on_rows() if given and is_shifted(given[0]) else self.requirements
        return count_step(count, self._check_values, needs, given, data_parallel_group)

    def _count_local(self, local: LocalBatch) -> Statistics:
        """Count in whole data that is narrowed to this loss's tokens."""
        if not self.requirements.counted:
            return Statistics({})
        batch = TokenBatch(local, ModelOutput())
        weights = Statistics({}) if local.weights is None else count_weights(local)
        return weights | count_units(batch, self.requirements.units) | self.count_from(batch)

    @torch.no_grad()
    def run_collect(self, call: LossCall) -> Statistics:
        if not self.needs_collect:
            raise ValueError(
                f"{type(self).__name__} in this configuration collects nothing from the model's output"
                + ("; count(...) gives its statistics" if self.needs_statistics else "")
            )
        if is_dtensor(call.output):
            call, options = on_shard(call, self.options)
            return self._with_options(options).run_collect(call)
        return self.collect_from(self._read(replace(call, statistics=Statistics({})))[0])

    def _read(self, call: LossCall) -> tuple[TokenBatch, Tensor | None]:
        """Check the call and read the model's output; an exact 0 carries a gradient that was computed on the way."""
        call = replace(call, data=with_labels(call.data))
        needs, group = self._needs(call.data), call.tensor_group
        head, logits = split_output(call.output, group)
        call = replace(call, data=self._complete(logits, call.data))
        layout = check_on_all_ranks(lambda: self._check(call, needs, head, logits), call, needs, logits, self.options)
        self.options.check_spans(logits, group)
        counts = ValidCounts.of(call.global_valid_seqs, call.global_valid_toks, logits.device)
        statistics = None if call.statistics is None else call.statistics.to(logits.device)
        local = LocalBatch(call.data, layout, counts, call.context_group, needs, statistics, heads=call.heads)
        local = self._narrowed(for_each_token(local, group))
        if head is not None:
            return self._read_head(local, head_of_tokens(head, layout, group), group)
        by_edges = needs.reads == "log-probs" and self.options.one_policy
        return self._read_output(local, logits if by_edges else rows_of_tokens(logits, layout), group), None

    def _with_options(self, options: VocabOptions) -> Self:
        """The same loss, and the same state, on another shard of the vocabulary."""
        loss = copy.copy(self)
        loss.options = options
        return loss

    def _needs(self, data: Mapping[str, object]) -> Requirements:
        """The requirements, with the options' fields and the optional ones of the data; unshifted if its labels are shifted."""
        needs = self.options.require(self.requirements.given(data))
        return needs.on_rows() if is_shifted(data) else needs

    def check_data(self, data: Mapping[str, Tensor], *, values: bool = True) -> None:
        check_predicts(type(self).__name__, self.requirements, data)
        data, needs = self._complete(None, with_labels(data)), self._needs(data)
        check_data(data, needs)
        if values and checks_values(data["input_ids"]):
            self._check_values(data, needs)

    def _check(self, call: LossCall, needs: Requirements, head: LMHeadInput | None, logits: Tensor) -> SequenceLayout:
        name, group = type(self).__name__, call.tensor_group
        if head is not None:
            check_lm_head(name, needs, self.options, head, group)
        check_predicts(name, self.requirements, call.data)
        read = ("input_ids", "token_mask", "sample_mask", *needs.names)
        self._check_heads(head, {field: call.heads[field] for field in read if field in call.heads}, group)
        check_statistics(name, needs, call.statistics)
        check_rank(call.tensor_rank, group)
        rows, width = check_data(call.data, needs, logits)
        if checks_values(call.data["input_ids"]):
            self._check_values(call.data, needs)
        layout = self._layout(call, logits, rows, width)
        if call.packed_sequences is not None and checks_values(call.data["token_mask"]):
            check_lengths(self._scored(call.data), layout)
        check_counts(call.global_valid_seqs, call.global_valid_toks, call.data)
        self._check_output(logits, call.data, group)
        if call.tree is not None:
            check_tree(call.tree, call.data, self._scored(call.data))
        if head is not None and call.tree is None:
            head.check_rows(layout.shard(self._scored(call.data), needs.shift, fill=False), group)
        return layout

    def _complete(self, logits: Tensor | None, data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The data with fields that this loss can do without; no logits yet: those that it may do without."""
        return data

    def _narrowed(self, local: LocalBatch) -> LocalBatch:
        """The batch whose mask is the tokens that this loss scores; here all valid ones, or those with a weight."""
        return local if self.requirements.token_weights is None else weighted(local)

    def _scored(self, data: Mapping[str, Tensor]) -> Tensor:
        """[B, S] bool: the tokens that may carry loss."""
        valid = valid_tokens(data)
        return valid if self.requirements.token_weights is None else valid & (data[WEIGHTS.name] > 0)

    def _check_values(self, data: Mapping[str, Tensor], needs: Requirements) -> None:
        """Refuse values that are wrong whatever the model's output is."""
        check_values(data, needs, truncated=bool(self.options.truncation))

    def _layout(self, call: LossCall, logits: Tensor, rows: int, width: int) -> SequenceLayout:
        return call.layout(logits, rows, width, self.options.cp_layout)

    def _check_output(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        """Refuse logits, and values of the data, that do not fit this loss and its options."""
        options = self.options
        options.check_temperature()
        check_logits(logits, options.consume_logits, options.backend)
        shard = options.shard(logits.shape[-1], tensor_group)
        if checks_values(data["input_ids"]):
            check_targets(torch.where(self._scored(data), data["input_ids"], 0), shard.vocab_size, ignore_index=None)
        if options.truncation.kept_sets:
            check_kept_ids(data["kept_ids"], self._scored(data), shard.vocab_size)

    def _check_heads(
        self, head: LMHeadInput | None, heads: Mapping[str, LMHeadInput], tensor_group: ProcessGroup | None
    ) -> None:
        """Refuse fields that are an `LMHeadInput` in place of a tensor, and a student's that does not suit them."""
        for name in heads:
            raise ValueError(f"{name} must be a tensor, got LMHeadInput")

    def _read_head(
        self, local: LocalBatch, head: LMHeadInput, tensor_group: ProcessGroup | None
    ) -> tuple[TokenBatch, Tensor | None]:
        """The same batch from hidden states, and the exact 0 that carries a gradient that was computed here already."""
        if self.requirements.reads == "logits":
            valid = self.options.shard(head.weight.shape[0], tensor_group).valid
            return self._read_output(local, whole_logits(head, local.mask, valid, tensor_group), tensor_group), None
        return project(local, head, tensor_group, self.options.for_batch(local), self.objective)

    def _read_output(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        """The batch with what the objective needs of the model's output."""
        options = self.options.for_batch(local)
        if options.truncation:
            return read_truncated_policy(local, logits, tensor_group, options)
        shard = options.shard(logits.shape[-1], tensor_group, entropy=self.requirements.entropy)
        shared = local.layout.tree if options.one_policy else None
        return TokenBatch(local, ModelOutput(read_stats(local, logits, shard, shared)))
