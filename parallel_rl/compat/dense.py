"""Log-probs of responses [B, A], as other projects hand them to their losses, as the `TokenBatch` that objectives read."""

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
    """A count as a float64 scalar: what it divides then keeps its precision. The host waits for no device."""
    if isinstance(count, Tensor):
        return count.to(device, torch.float64, non_blocking=True)
    return torch.full((), count, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Step:
    """Counts, ranks and statistics of the step, which an origin's call has no arguments for.

    seqs, toks: valid sequences and tokens of the whole optimizer step; None are those of this call, over `context_group`.
    context_group: the ranks over which the tokens of each row are spread, [B, A/cp] each, all tensors of a call cut alike.
    statistics: of the whole step, for a loss that has `collect`.
    """

    seqs: Count | None = None
    toks: Count | None = None
    context_group: ProcessGroup | None = None
    statistics: Statistics | None = None

    def __post_init__(self) -> None:
        if (self.seqs is None) != (self.toks is None):
            given, missing = ("toks", "seqs") if self.seqs is None else ("seqs", "toks")
            raise ValueError(
                f"global_valid_{given} is given, global_valid_{missing} is not: a step has both, see count_valid"
            )

    @property
    def alone(self) -> bool:
        """Whether this call of this rank is all of the step, as its origin has it."""
        return self.seqs is None and group_size(self.context_group) == 1

    def with_statistics(self) -> Step:
        """Check that a loss with `collect` got both counts and statistics, and return the step itself.

        Raises:
            ValueError: counts of the step without its statistics, or the other way round.
        """
        if (self.seqs is None) != (self.statistics is None):
            raise ValueError(
                "statistics=, the reduced result of collect(...), goes with global_valid_seqs and global_valid_toks; "
                + ("the counts are" if self.seqs is None else "it is")
                + " missing"
            )
        return self

    def of(self, part: str) -> Step:
        """The step of one part of its rows, whose counts are among the statistics."""
        if self.statistics is None:
            return self
        seqs, toks = (self.statistics[f"{part}_{of}"].clamp(min=1) for of in ("seqs", "toks"))
        return Step(seqs, toks, self.context_group)


def token_mean(
    values: Tensor, mask: Tensor, count: Count | None = None, context_group: ProcessGroup | None = None
) -> Tensor:
    """Share of the mean over valid tokens, which are spread over the context ranks; 0 of none.

    Args:
        values: any shape, NaN or inf where masked. mask: the same shape, bool. count: valid tokens of the whole step; None:
            these, over the context ranks.
    """
    count = group_sum(mask.sum(), context_group).clamp(min=1) if count is None else count
    total = torch.where(mask, values, 0).sum(dtype=torch.float64) / count
    return total.to(math_dtype(values.dtype))


def row_mean(values: Tensor, count: Count | None = None, context_group: ProcessGroup | None = None) -> Tensor:
    """Share of the mean of numbers of whole sequences, which every context rank holds; 0 of none.

    Args:
        values: any shape. count: how many there are in the whole step; None: these.
    """
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
    """The batch that a loss's `compute` reads.

    Args:
        logprobs: [B, A] of the current policy, with gradient.
        mask: [B, A] tokens that carry loss, any dtype; None is all of them.
        fields: name → [B, A] or [B].
        step: counts and groups; None is a call alone.
        rows: [B] bool, the sequences that count; None is all of them.
        count_empty: whether a row without a token is one of the sequences, where `step` does not give their number.

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
    one, needs = torch.ones(()), Requirements(tuple(map(_field, fields, fields.values())), shift=False)
    layout = row_layout(mask, step.context_group)
    local = LocalBatch(data, layout, ValidCounts(one, one), step.context_group, needs, step.statistics, cut_rows=True)
    lengths = local.tokens_per_sequence
    own = (rows if count_empty else lengths > 0).sum().clamp(min=1), lengths.sum().clamp(min=1)
    seqs, toks = (
        as_count(mine if count is None else count, flat.device)
        for count, mine in zip((step.seqs, step.toks), own, strict=True)
    )
    return TokenBatch(
        replace(local, counts=ValidCounts(seqs, toks)), ModelOutput(TokenStats(flat, None, flat.detach()))
    )


def with_field(batch: TokenBatch, name: str, values: Tensor) -> TokenBatch:
    """The batch of a `dense_batch` with one field more, or another one of that name; values are flat, [T_local]."""
    local, values = batch.local, values.view(batch.shape)
    others = tuple(field for field in local.requirements.fields if field.name != name)
    needs = replace(local.requirements, fields=(*others, _field(name, values)))
    return replace(batch, local=replace(local, data={**local.data, name: values}, requirements=needs))


def _field(name: str, values: Tensor) -> Field:
    return Field(
        name, "token" if values.dim() == 2 else "sequence", "float" if values.is_floating_point() else "integer"
    )
