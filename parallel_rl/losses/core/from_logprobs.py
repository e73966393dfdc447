"""The run of a loss on a host's log-probs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.counts import ValidCounts
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.call import share_of
from parallel_rl.losses.core.checks import check_counts, check_log_probs, check_pairs, check_statistics, known_counts
from parallel_rl.losses.core.counted import count_local
from parallel_rl.losses.core.log_prob_call import (
    LogProbCall,
    check_mask,
    check_reads,
    counted_rows,
    field_rows,
    rows_and_data,
)
from parallel_rl.losses.core.log_prob_rows import rows_batch
from parallel_rl.replicated import Replicated
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.stats import TokenStats

if TYPE_CHECKING:
    from parallel_rl.losses.core.local_batch import LocalBatch
    from parallel_rl.losses.core.loss import Loss
    from parallel_rl.metrics import Metrics
    from parallel_rl.statistics import Statistics


def run_on_rows(loss: Loss, call: LogProbCall) -> tuple[Tensor, Metrics]:
    """Compute this rank's share of the loss, and its metrics."""
    batch = _read_rows(loss, call)[1]
    loss.recorded_check(batch)
    share, metrics = loss.compute(batch)
    return share_of(share, None), metrics


def collect_on_rows(loss: Loss, call: LogProbCall) -> Statistics:
    """Collect this rank's part of the statistics, of the data and of the log-probs."""
    local, batch = _read_rows(loss, call)
    counted = count_local(loss, loss.narrowed(replace(local, statistics=None)))
    return counted | loss.collect_from(batch) if loss.requirements.collected else counted


def _read_rows(loss: Loss, call: LogProbCall) -> tuple[LocalBatch, TokenBatch]:
    """Check the call; its batch before it is narrowed to the loss's tokens, and after."""
    needs = loss.requirements.given(dict.fromkeys(call.names))

    def check() -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        check_reads(type(loss).__name__, needs, loss.options, call)
        check_statistics(type(loss).__name__, needs, call.statistics)
        rows, data = rows_and_data(call, needs, loss.options)
        if needs.paired:
            check_pairs(rows.number)
        logprobs = rows.take(call.logprobs)
        if checks_values(data["token_mask"]):
            loss.check_data(data, needs.on_rows())
            check_mask(call, rows, data["sample_mask"])
            check_log_probs(logprobs, valid_tokens(data, shift=False))
        check_counts(call.global_valid_seqs, call.global_valid_toks, counted_rows(call, data), shift=False)
        entropy = None if call.entropy is None else field_rows("entropy", call.entropy, rows, call)
        return logprobs, entropy, data

    numbers = known_counts(call.global_valid_seqs, call.global_valid_toks)
    alike = Replicated(numbers=numbers, advice=("give all context ranks the counts of the whole step",))
    logprobs, entropy, data = raise_on_all_ranks(check, [call.context_group], call.like, call.facts, alike=alike)
    counts = ValidCounts.of(call.global_valid_seqs, call.global_valid_toks, logprobs.device)
    statistics = None if call.statistics is None else call.statistics.to(logprobs.device)
    whole = rows_batch(data, counts, call.context_group, needs.on_rows(), statistics)
    local = loss.narrowed(whole)
    flat = _masked(logprobs, local.mask)
    found = TokenStats(flat, None if entropy is None else _masked(entropy, local.mask), torch.zeros_like(flat))
    return whole, TokenBatch(local, ModelOutput(found))


def _masked(rows: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, rows.to(math_dtype(rows.dtype)).flatten(), 0)
