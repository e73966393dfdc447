"""The run of a loss on logits or hidden states: check on all ranks, read the model's output, compute."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from parallel_rl.counts import ValidCounts
from parallel_rl.groups import check_rank
from parallel_rl.labels import is_shifted, with_labels
from parallel_rl.losses.core.call import LossCall, share_of
from parallel_rl.losses.core.checks import (
    check_counts,
    check_data,
    check_lengths,
    check_on_all_ranks,
    check_predicts,
    check_statistics,
    check_temperature,
)
from parallel_rl.losses.core.dtensor_call import on_shard
from parallel_rl.losses.core.from_hidden_states import check_lm_head
from parallel_rl.losses.core.local_batch import LocalBatch
from parallel_rl.losses.core.one_row import check_tree, for_each_token, head_of_tokens, rows_of_tokens
from parallel_rl.losses.core.truncated_policy import with_dropped
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.dtensor import is_dtensor
from parallel_rl.vocab.linear.lm_head import split_output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from parallel_rl.layout import SequenceLayout
    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.core.loss import Loss, Reader
    from parallel_rl.losses.core.requirements import Requirements
    from parallel_rl.metrics import Metrics
    from parallel_rl.vocab.linear.lm_head import LMHeadInput


def run(loss: Loss, call: LossCall) -> tuple[Tensor, Metrics]:
    """Compute this rank's share of the loss, and its metrics."""
    loss, call = _on_shard(loss, call)
    batch, carrier = _read(loss, call)
    loss.recorded_check(batch, may_wait=call.may_wait)
    share, metrics = loss.compute(batch)
    metrics = with_dropped(metrics, batch.local.dropped)
    if call.observe is not None:
        call.observe(batch, share.detach(), metrics)
    return share_of(share, carrier), metrics


def collect(loss: Loss, call: LossCall) -> Statistics:
    """Collect this rank's part of the statistics that the model's output gives.

    Raises:
        ValueError: the loss collects nothing; what `run` refuses.
    """
    needs = loss.requirements
    if not needs.collected:
        raise ValueError(
            f"{type(loss).__name__} in this configuration collects nothing from the model's output"
            + ("; count(...) gives its statistics" if needs.statistics else "")
        )
    return loss.collect_from(read(loss, replace(call, statistics=Statistics({}))))


def read(loss: Loss, call: LossCall) -> TokenBatch:
    """Check the call on all ranks and read the model's output into the batch that `compute` sees."""
    return _read(*_on_shard(loss, call))[0]


def check_inputs(loss: Loss, data: Mapping[str, Tensor], *, values: bool) -> None:
    """Check whole data on this rank, before there is any output.

    Raises:
        ValueError: fields, or `values`, that `run` refuses.
    """
    check_predicts(type(loss).__name__, loss.requirements, data)
    data = loss.reader.complete(None, with_labels(data))
    needs = _needs(loss, data)
    check_data(data, needs)
    if values and checks_values(data["input_ids"]):
        loss.check_data(data, needs)
        check_temperature(data, needs)


def _on_shard(loss: Loss, call: LossCall) -> tuple[Loss, LossCall]:
    """Take this rank's shard of logits that are a DTensor."""
    if not is_dtensor(call.output):
        return loss, call
    call, options = on_shard(call, loss.options)
    return loss.with_options(options), call


def _read(loss: Loss, call: LossCall) -> tuple[TokenBatch, Tensor | None]:
    """Read the model's output; an exact 0 carries a gradient that was computed on the way."""
    reader, group = loss.reader, call.tensor_group
    call = replace(call, data=with_labels(call.data))
    needs = _needs(loss, call.data)
    head, logits = split_output(call.output, group)
    call = replace(call, data=reader.complete(logits, call.data))
    layout = check_on_all_ranks(
        lambda: _check(loss, reader, call, needs, head, logits), call, needs, logits, loss.options
    )
    loss.options.check_spans(logits, group)
    counts = ValidCounts.of(call.global_valid_seqs, call.global_valid_toks, logits.device)
    statistics = None if call.statistics is None else call.statistics.to(logits.device)
    local = LocalBatch(call.data, layout, counts, call.context_group, needs, statistics, heads=call.heads)
    local = loss.narrowed(for_each_token(local, group))
    if head is not None:
        return reader.read_head(local, head_of_tokens(head, layout, group), group)
    return reader.read(local, logits if reader.by_edges else rows_of_tokens(logits, layout), group), None


def _needs(loss: Loss, data: Mapping[str, object]) -> Requirements:
    """Find the requirements of a call on this data: optional fields that are there, and what the options read."""
    needs = loss.requirements.given(data)
    needs = needs.on_rows() if is_shifted(data) else needs
    needs = needs.with_kept_ids() if loss.options.truncation.kept_sets else needs
    return needs.with_temperature() if loss.options.per_sample else needs


def _check(
    loss: Loss, reader: Reader, call: LossCall, needs: Requirements, head: LMHeadInput | None, logits: Tensor
) -> SequenceLayout:
    """Check what types, shapes, options and groups tell, then what values tell; return the layout of the logits."""
    name, group = type(loss).__name__, call.tensor_group
    if head is not None:
        check_lm_head(name, needs, loss.options, head, group)
    check_predicts(name, loss.requirements, call.data)
    names = ("input_ids", "token_mask", "sample_mask", *needs.names)
    reader.check_heads(head, {field: call.heads[field] for field in names if field in call.heads}, group)
    check_statistics(name, needs, call.statistics)
    check_rank(call.tensor_rank, group)
    rows, width = check_data(call.data, needs, logits)
    if checks_values(call.data["input_ids"]):
        loss.check_data(call.data, needs)
        check_temperature(call.data, needs)
    layout = reader.layout(logits, rows, width, call.context_group)
    layout = call.layout(logits, rows, width, loss.options.cp_layout) if layout is None else layout
    if call.packed_sequences is not None and checks_values(call.data["token_mask"]):
        check_lengths(loss.scored(call.data), layout)
    check_counts(call.global_valid_seqs, call.global_valid_toks, call.data)
    reader.check(logits, call.data, group)
    if call.tree is not None:
        check_tree(call.tree, call.data, loss.scored(call.data))
    if head is not None and call.tree is None:
        head.check_rows(layout.shard(loss.scored(call.data), needs.shift, fill=False), group)
    return layout
