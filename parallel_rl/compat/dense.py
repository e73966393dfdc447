"""Convert other projects' log-probs of responses [B, A] to the `TokenBatch` that our losses read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.counts import ValidCounts
from parallel_rl.groups import group_size, group_sum
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.local_batch import LocalBatch
from parallel_rl.losses.core.log_prob_rows import row_layout
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.stats import TokenStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parallel_rl.statistics import Statistics

#: a count of the whole step: a scalar tensor (no host sync) or a number
Count = Tensor | float


def as_count(count: Count, device: torch.device | None = None) -> Tensor:
    """Convert a count to a float64 scalar, which keeps the quotient's precision, without a host sync."""
    if isinstance(count, Tensor):
        return count.to(device, torch.float64, non_blocking=True)
    return torch.full((), count, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Step:
    """Counts, ranks and statistics of the step, which an origin's call has no arguments for.

    seqs, toks: valid sequences and tokens of the whole optimizer step; None: of this call, over `context_group`, the ranks that
    split each row's tokens, [B, A/cp] each, alike in all tensors. statistics: of the whole step, for a loss with `collect`.
    """

    seqs: Count | None = None
    toks: Count | None = None
    context_group: ProcessGroup | None = None
    statistics: Statistics | None = None

    def __post_init__(self) -> None:
        if (self.seqs is None) != (self.toks is None):
            present, missing = ("toks", "seqs") if self.seqs is None else ("seqs", "toks")
            raise ValueError(
                f"global_valid_{present} is given without global_valid_{missing}; give both, see count_valid"
            )

    @property
    def alone(self) -> bool:
        return self.seqs is None and group_size(self.context_group) == 1

    def with_statistics(self) -> Step:
        """Return the step; ValueError if only one of counts and statistics is given."""
        if (self.seqs is None) != (self.statistics is None):
            raise ValueError(
                "statistics=, the reduced result of collect(...), goes with global_valid_seqs and global_valid_toks; "
                + ("the counts are" if self.seqs is None else "it is")
                + " missing"
            )
        return self

    def of(self, part: str) -> Step:
        """Restrict the step to the rows of `part`, with their counts from the statistics."""
        if self.statistics is None:
            return self
        seqs, toks = (self.statistics[f"{part}_{unit}"].clamp(min=1) for unit in ("seqs", "toks"))
        return Step(seqs, toks, self.context_group)


def token_mean(
    values: Tensor, mask: Tensor, count: Count | None = None, context_group: ProcessGroup | None = None
) -> Tensor:
    """Compute this rank's part of the mean over valid tokens of all context ranks; 0 without any.

    values may be NaN where masked. count: of the step; None: of the call.
    """
    count = group_sum(mask.sum(), context_group).clamp(min=1) if count is None else count
    total = torch.where(mask, values, 0).sum(dtype=torch.float64) / count
    return total.to(math_dtype(values.dtype))


def row_mean(values: Tensor, count: Count | None = None, context_group: ProcessGroup | None = None) -> Tensor:
    """Compute this rank's part of a mean over `count` (None: this call's) sequences, whole on each rank."""
    count = max(values.numel(), 1) if count is None else count
    total = values.sum(dtype=torch.float64) / (count * group_size(context_group))
    return total.to(math_dtype(values.dtype))


def dense_batch(
    logprobs: Tensor,
    mask: Tensor | None,
    fields: Mapping[str, Tensor] | None = None,
    step: Step | None = None,
    *,
    rows: Tensor | None = None,
    count_empty: bool = True,
) -> TokenBatch:
    """Build the batch that a loss's `compute` reads.

    Args:
        logprobs: [B, A] of the current policy, with gradient. mask: [B, A] of loss tokens, any dtype; None: all.
        fields: name → [B, A] or [B]. step: counts and groups; None: the call is the step.
        rows: [B] bool, sequences that count; None: all. count_empty: rows without a token are sequences if `step` has no count.

    Raises:
        ValueError: shapes that differ, log-probs of an integer dtype.
    """
    step, fields = step or Step(), dict(fields or {})
    if logprobs.dim() != 2 or not logprobs.is_floating_point():
        raise ValueError(f"log-probs must be floating point [B, A], got {logprobs.dtype} {list(logprobs.shape)}")
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    rows = mask.new_ones(len(mask)) if rows is None else rows
    for name, value in {"mask": mask, **fields}.items():
        if value.shape not in (logprobs.shape, logprobs.shape[:1]):
            raise ValueError(f"{name} has shape {list(value.shape)}; the log-probs have {list(logprobs.shape)}")
    data = {**fields, "token_mask": mask, "sample_mask": rows}
    flat = torch.where(mask & rows[:, None], logprobs.to(math_dtype(logprobs.dtype)), 0).flatten()
    unused, needs = torch.ones(()), Requirements(tuple(map(_field, fields, fields.values())), shift=False)
    layout = row_layout(mask, step.context_group)
    local = LocalBatch(
        data, layout, ValidCounts(unused, unused), step.context_group, needs, step.statistics, cut_rows=True
    )
    lengths = local.tokens_per_sequence
    local_counts = (rows if count_empty else lengths > 0).sum().clamp(min=1), lengths.sum().clamp(min=1)
    seqs, toks = (
        as_count(of_call if count is None else count, flat.device)
        for count, of_call in zip((step.seqs, step.toks), local_counts, strict=True)
    )
    return TokenBatch(
        replace(local, counts=ValidCounts(seqs, toks)), ModelOutput(TokenStats(flat, None, flat.detach()))
    )


def with_field(batch: TokenBatch, name: str, values: Tensor) -> TokenBatch:
    """Return the batch of `dense_batch` with a field added or replaced; values are flat, [T_local]."""
    local, values = batch.local, values.view(batch.shape)
    others = tuple(field for field in local.requirements.fields if field.name != name)
    needs = replace(local.requirements, fields=(*others, _field(name, values)))
    return replace(batch, local=replace(local, data={**local.data, name: values}, requirements=needs))


def _field(name: str, values: Tensor) -> Field:
    return Field(
        name, "token" if values.dim() == 2 else "sequence", "float" if values.is_floating_point() else "integer"
    )
