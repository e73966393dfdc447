"""Run a loss on a micro-batch, or count a step's statistics from its data alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from parallel_rl.agreement import communication_device, raise_on_all_ranks
from parallel_rl.counts import ValidCounts
from parallel_rl.groups import ParallelGroups, check_rank
from parallel_rl.labels import check_labels, is_shifted, with_labels
from parallel_rl.layout import SequenceLayout
from parallel_rl.losses.core.aggregation import count_units, count_weights
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.call import HostLogProbs, LossCall, share_of
from parallel_rl.losses.core.checks import (
    check_counts,
    check_fields,
    check_predicts,
    check_statistics,
    check_temperature,
    known_counts,
)
from parallel_rl.losses.core.local_batch import LocalBatch
from parallel_rl.losses.core.log_probs_source import LogProbs
from parallel_rl.losses.core.logits_source import Logits, needs_of, on_shard
from parallel_rl.losses.core.one_row import for_each_token
from parallel_rl.losses.core.readers import with_dropped
from parallel_rl.statistics import Statistics
from parallel_rl.validation import checks_values
from parallel_rl.vocab.dtensor import is_dtensor
from parallel_rl.vocab.linear.lm_head import LMHeadInput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.loss import Loss
    from parallel_rl.losses.core.requirements import Requirements
    from parallel_rl.losses.core.source import Placed, Source
    from parallel_rl.metrics import Metrics


class ReadOutput(NamedTuple):
    """Result of `read`: the loss of the call (on this rank's columns of a DTensor) and its batch.

    `unrestricted` is the data before the restriction to scored tokens, `carrier` a 0 with a gradient made in forward, or None.
    """

    loss: Loss
    unrestricted: LocalBatch
    batch: TokenBatch
    carrier: Tensor | None


def run(loss: Loss, call: LossCall) -> tuple[Tensor, Metrics]:
    loss, _, batch, carrier = read(loss, call)
    loss.recorded_check(batch, may_wait=call.may_wait)
    share, metrics = loss.compute(batch)
    metrics = with_dropped(metrics, batch.local.dropped)
    if call.observe is not None:
        call.observe(batch, share.detach(), metrics)
    return share_of(share, carrier), metrics


def collect(loss: Loss, call: LossCall) -> Statistics:
    """Collect this rank's part of a call's statistics; ValueError if there is none to collect."""
    needs, of_host = loss.requirements, isinstance(call.output, HostLogProbs)
    if not (needs.statistics if of_host else needs.collected):
        what = "needs no statistics of the step" if of_host else "collects nothing from the model's output"
        cure = "; count(...) gives its statistics" if needs.statistics else ""
        raise ValueError(f"{type(loss).__name__} in this configuration {what}{cure}")
    loss, unrestricted, batch, _ = read(loss, replace(call, statistics=Statistics({})))
    if not of_host:
        return loss.collect_from(batch)
    counted = count_local(loss, loss.narrowed(replace(unrestricted, statistics=None)))
    return counted | loss.collect_from(batch) if needs.collected else counted


def read(loss: Loss, call: LossCall) -> ReadOutput:
    """Check a call and read the model's output; if one rank's check fails, all its ranks raise ValueError."""
    source = _source(loss, call)
    loss, needs = source.loss, source.needs()
    numbers = known_counts(call.global_valid_seqs, call.global_valid_toks)
    groups, facts, alike = source.agreement(needs, numbers)
    placed = raise_on_all_ranks(lambda: check(source, call, needs), groups, source.template, facts, alike=alike)
    device = source.template.device
    counts = ValidCounts.of(call.global_valid_seqs, call.global_valid_toks, device)
    statistics = None if call.statistics is None else call.statistics.to(device)
    unrestricted = LocalBatch(
        placed.data, placed.layout, counts, call.context_group, placed.needs, statistics, heads=call.heads,
        cut_rows=placed.of_host,
    )  # fmt: skip
    if placed.layout.tree is not None:
        unrestricted = for_each_token(unrestricted, call.tensor_group)
    return ReadOutput(loss, unrestricted, *source.read(loss.narrowed(unrestricted), placed))


def _source(loss: Loss, call: LossCall) -> Source:
    output = call.output
    if isinstance(output, HostLogProbs):
        return LogProbs.of(loss, call, output)
    if is_dtensor(output):
        call, options = on_shard(call, loss.options)
        loss, output = loss.with_options(options), call.output
    if not isinstance(output, (Tensor, LMHeadInput)):
        raise ValueError(f"the model's output must be logits, an LMHeadInput or log-probs, got {type(output).__name__}")
    return Logits.of(loss, call, output)


def check(source: Source, call: LossCall, needs: Requirements) -> Placed:
    """Check types, shapes, options and groups, then values, output and counts; return the placed data."""
    loss = source.loss
    source.check_reads(needs)
    check_statistics(type(loss).__name__, needs, call.statistics)
    check_rank(call.tensor_rank, call.tensor_group)
    placed = source.place(needs)
    if checks_values(placed.data["token_mask"]):
        loss.check_data(placed.data, placed.needs)
    source.check_output(placed)
    check_counts(call.global_valid_seqs, call.global_valid_toks, placed.counted, shift=not placed.of_host)
    return placed


def check_inputs(loss: Loss, data: Mapping[str, Tensor], *, values: bool) -> None:
    """Refuse data that `run` would refuse, on this rank alone and before there is an output; `values` too."""
    check_predicts(type(loss).__name__, loss.requirements, data)
    data = loss.reader.add_fields(None, with_labels(data))
    needs = needs_of(loss, data)
    check_fields(data, needs)
    if values and checks_values(data["input_ids"]):
        loss.check_data(data, needs)
        check_temperature(data, needs)


def count_step(
    loss: Loss, batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]], group: ProcessGroup | None
) -> Statistics:
    """Sum what micro-batches and data ranks count; ValueError on all ranks for data that does not fit."""
    if not loss.requirements.counted:
        return Statistics({})
    labelled = [with_labels(data) for data in ([batches] if isinstance(batches, Mapping) else batches)]
    needs = loss.requirements.on_rows() if labelled and is_shifted(labelled[0]) else loss.requirements
    needs = replace(needs, fields=tuple(field for field in needs.fields if field.per != "local"))
    ids = [data["input_ids"] for data in labelled if isinstance(data.get("input_ids"), torch.Tensor)]
    device = communication_device(group, ids[0].device if ids else torch.device("cpu"))

    def check() -> None:
        for data in labelled:
            check_labels(data)
            ids = data.get("input_ids")
            check_fields(data, needs, ids if isinstance(ids, torch.Tensor) else torch.empty(0))
            if checks_values(data["input_ids"]):
                loss.check_data(data, needs)

    raise_on_all_ranks(check, [group], torch.empty(0, device=device))
    batches_of_rank = (_whole(data, needs) for data in labelled or [masked_data(needs, 0, 1)])
    counted = reduce(add, [count_local(loss, loss.narrowed(local)) for local in batches_of_rank])
    return counted.to(device).reduce(ParallelGroups(data=group))


def count_local(loss: Loss, local: LocalBatch) -> Statistics:
    if not loss.requirements.counted:
        return Statistics({})
    batch = TokenBatch(local, ModelOutput())
    weights = Statistics({}) if local.weights is None else count_weights(local)
    return weights | count_units(batch, loss.requirements.units) | loss.count_from(batch)


def _whole(data: Mapping[str, Tensor], needs: Requirements) -> LocalBatch:
    ids = data["input_ids"]
    one = torch.ones((), dtype=torch.int64, device=ids.device)
    layout = SequenceLayout.padded(*ids.shape, device=ids.device)
    return LocalBatch(data, layout, ValidCounts(one, one), requirements=needs)


def masked_data(needs: Requirements, rows: int, width: int) -> dict[str, Tensor]:
    """Make a fully masked batch [rows, width] with every required field."""
    data = {
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
        "token_mask": torch.zeros(rows, width),
        "sample_mask": torch.zeros(rows),
    }
    for field in needs.fields:
        shape = (rows,) if field.per == "sequence" else (rows, width, 1) if field.width else (rows, width)
        data[field.name] = torch.zeros(shape, dtype=torch.float32 if field.dtype in ("float", "label") else torch.int64)
    return data
