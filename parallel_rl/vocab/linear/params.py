"""Parameters of one call of the LM head: operands, rows and columns, fetching and projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.groups import Pending, all_gather_start, group_rank, group_size
from parallel_rl.vocab.backends.choice import runs_on_triton, tops_of
from parallel_rl.vocab.backends.passes import RowSpec, drop_below_
from parallel_rl.vocab.backends.torch_backend import math_dtype, rows_of
from parallel_rl.vocab.linear.gemm import project
from parallel_rl.vocab.linear.plan import Plan, columns_of_rank, kept_dtype, make_plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.linear.lm_head import LMHeadInput
    from parallel_rl.vocab.linear.plan import LinearMode
    from parallel_rl.vocab.shards import VocabShard

#: an index of rows: a slice for adjacent rows, which gives a view, else a tensor
Rows = slice | torch.Tensor


@dataclass(frozen=True)
class LossRows:
    """Rows to project: `order[part, i]` is the i-th of each part, loss-carrying rows first.

    Gathered hidden states are ordered part by part. The order is as long as the most loss-carrying rows of a part: counted on
    the host if the mask is there, else bounded by the caller.
    """

    order: Tensor | None  # [parts, count]; None: all rows in order
    parts: int
    count: int  # rows of each part that are projected
    rows_per_part: int  # R
    rank: int  # this rank's part
    excess: Tensor | None  # 0-dim bool: more rows carry loss than the bound
    device: torch.device

    @classmethod
    def of(cls, keep: Tensor, parts: int, bound: int | None, group: ProcessGroup | None) -> LossRows:
        mask = keep.view(parts, -1)
        total, excess = mask.shape[1], None
        needed = total if bound is None else min(bound, total)
        if keep.device.type == "cpu":  # free: the host reads its own memory
            needed = min(needed, int(mask.numpy().sum(1).max(initial=0)))
        if bound is not None:
            excess = mask.sum(1).amax() > bound if total else None
        order = None
        if needed < total:
            order = torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True)[:, :needed]
        return cls(order, parts, needed, total, group_rank(group) if parts > 1 else 0, excess, keep.device)

    def spans(self, size: int) -> list[slice]:
        return [slice(at, min(at + size, self.count)) for at in range(0, self.count, size)]

    def local(self, span: slice) -> Rows:
        """Return the indices of a span's rows among this rank's hidden states."""
        return span if self.order is None else self.order[self.rank, span]

    def own_gathered(self, span: slice) -> Rows:
        """Return the indices of the same rows in gathered order."""
        rows, offset = self.local(span), self.rank * self.rows_per_part
        return slice(rows.start + offset, rows.stop + offset) if isinstance(rows, slice) else rows + offset

    def gathered(self, *spans: slice) -> Rows:
        """Return the gathered indices of all parts' rows of consecutive spans, span after span."""
        if self.parts == 1:
            return self.local(slice(spans[0].start, spans[-1].stop))
        return torch.cat([self._of_parts(span) for span in spans])

    def _of_parts(self, span: slice) -> Tensor:
        indices = (
            self.order[:, span] if self.order is not None else torch.arange(span.start, span.stop, device=self.device)
        )
        offsets = torch.arange(self.parts, device=self.device)[:, None] * self.rows_per_part
        return (indices + offsets).reshape(-1)


def put_rows(target: Tensor, rows: Rows, values: Tensor) -> None:
    if isinstance(rows, slice):
        target[rows].copy_(values)
    else:
        target.index_copy_(0, rows, values.to(target.dtype))


#: [N] (log-prob, entropy, lse, Σπ²) of rows in the gathered order
RowStats = tuple["Tensor", "Tensor | None", "Tensor", "Tensor | None"]


class FetchedRows(NamedTuple):
    """Hidden states [n, D] of a span, and [m, D] of its group, whose later spans are still to come."""

    span: slice
    hidden: Tensor
    of_group: Tensor


@dataclass(frozen=True)
class LinearParams:
    """One call of the LM head: N = parts · R rows, in gathered order."""

    hidden: Tensor  # [R, D]
    weight: Tensor  # [W, D], real columns only
    bias: Tensor | None  # [W]
    targets: Tensor  # [N]
    keep: Tensor  # [N] bool
    inv_t: Tensor  # [N, 1] or [1, 1]
    kept_ids: Tensor | None  # [N, K] the sampler's recorded sets
    shard: VocabShard
    softcap: float | None  # of the logits before their scale
    scatter: bool  # sequence parallelism: hidden states are split over the group's ranks
    rows: LossRows
    plan: Plan
    masked: bool  # forward reads rows without loss as 0
    grad_in_operand_dtype: bool  # Triton writes the logits' gradient in the operands' dtype, over kept logits

    @classmethod
    def of(
        cls,
        head: LMHeadInput,
        shard: VocabShard,
        targets: Tensor,
        keep: Tensor,
        kept_ids: Tensor | None,
        mode: LinearMode,
        keeps: bool,
    ) -> LinearParams:
        """Set up the call for [N] targets and [N, K] recorded sets in gathered order.

        A call without backward (`keeps` False) keeps no logits but uses the same chunks, for the same bits.
        """
        if isinstance(shard.temperature, torch.Tensor) and shard.temperature.dim():
            in_order = head.row_order(shard.group).to_rows(shard.temperature.reshape(-1))
            shard = replace(shard, temperature=in_order)
        hidden, parts = head.hidden, head.parts(shard.group)
        dtype = math_dtype(hidden.dtype)
        width = columns_of_rank(shard.valid, shard.vocab_size, shard.group)
        # Triton's passes write the gradient in any dtype; a soft cap's slope must come before rounding
        low = hidden.dtype != dtype and head.softcap is None and runs_on_triton(hidden, shard.backend)
        narrower = dtype.itemsize - hidden.dtype.itemsize
        spared = head.weight.shape[1] * width * narrower if head.weight.requires_grad else 0
        shape = replace(
            head.plan_shape(shard.group, width),
            in_place=low or hidden.dtype == dtype,
            whole_rows=bool(shard.truncation),
            spared=spared,
        )
        plan = make_plan(shape, mode, head.budget)
        # a gradient reads all rows, as does a threshold's search, which backward repeats; otherwise rows without loss may
        # hold anything. Rows are read alike with and without gradient: a product of a copy may have other bits
        masked = plan.resident or mode == "in_forward" or (bool(shard.truncation) and kept_ids is None)
        if not keeps:
            plan = replace(plan, resident=False)
        rows = LossRows.of(keep, parts, head.rows, shard.group)
        shard = replace(shard, logit_scale=shard.logit_scale * head.logit_scale)
        inv_t = shard.inverse_temperature(dtype, hidden.device)
        return cls(
            hidden, head.weight, head.bias, targets, keep, inv_t, kept_ids, shard, head.scaled_softcap, head.sequence_parallel,
            rows, plan, masked, low,
        ).with_operands(head.hidden, head.weight, head.bias)  # fmt: skip

    def with_operands(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LinearParams:
        """Replace the operands, detached: flat hidden states, and the real columns of weight and bias."""
        return replace(
            self,
            hidden=hidden.detach().reshape(-1, hidden.shape[-1]),
            weight=weight.detach()[: self.shard.valid],
            bias=None if bias is None else bias.detach()[: self.shard.valid],
        )

    @property
    def dtype(self) -> torch.dtype:
        return math_dtype(self.hidden.dtype)

    @property
    def kept_dtype(self) -> torch.dtype:
        return kept_dtype(self.hidden.dtype)

    @property
    def tops_per_row(self) -> int:
        """Return the number of tops of a kept row: with Triton's statistics pass one for each block."""
        return tops_of(self.shard.valid) if self.grad_in_operand_dtype else 1

    @property
    def rows_together(self) -> int:
        """Return the rows a part whose gradients in_forward computes together."""
        if self.plan.group > self.plan.size:
            return self.plan.group
        # one is projected while the other's numbers are exchanged
        return self.plan.size * (2 if group_size(self.shard.group) > 1 else 1)

    @property
    def columns(self) -> slice:
        return slice(0, self.shard.valid)

    def spec(self, rows: Rows, columns: slice) -> RowSpec:
        inv_t = rows_of(self.inv_t, rows)
        start, stop = columns.start, columns.stop
        return RowSpec(self.targets[rows], self.keep[rows], inv_t, self.shard.start + start, stop - start)

    def fetched(self, spans: Sequence[slice], together: int = 1, masked: bool = True) -> Iterator[FetchedRows]:
        """Yield hidden states span by span, while the next are fetched; `masked` sets rows without loss to 0.

        Masked spans come in groups of `together` rows a part, adjacent in memory.
        """
        assert masked or together == 1
        rows, zero = self.rows, self.hidden.new_zeros(())
        group: Tensor | None = None

        def fetch(span: slice) -> tuple[Pending, Tensor | None]:
            nonlocal group
            hidden, at, count = self.hidden[rows.local(span)], span.start % together, span.stop - span.start
            if at == 0:
                of_group = min(together, rows.count - span.start)
                group = self.buffer(of_group, hidden.shape[1], hidden.dtype) if of_group > count else None
            place = None if group is None else group[rows.parts * at : rows.parts * (at + count)]
            if masked:
                keep = self.keep[rows.own_gathered(span)][:, None]
                hidden = torch.where(keep, hidden, zero, out=None if self.scatter else place)
            if self.scatter:
                return all_gather_start(hidden, self.shard.group, place), group
            return Pending(hidden, None), group

        on_its_way: tuple[Pending, Tensor | None] | None = None
        for index, span in enumerate(spans):
            arriving, of_group = fetch(span) if on_its_way is None else on_its_way
            hidden = arriving.wait()
            on_its_way = fetch(spans[index + 1]) if index + 1 < len(spans) else None
            yield FetchedRows(span, hidden, hidden if of_group is None else of_group)

    def logits(self, hidden: Tensor, out: Tensor, columns: slice) -> Tensor:
        """Project [n, D] hidden rows to logits [n, columns], in the first elements of `out`."""
        rows, width = hidden.shape[0], columns.stop - columns.start
        z = out.view(-1)[: rows * width].view(rows, width)
        bias = None if self.bias is None else self.bias[columns]
        return project_rows(hidden, self.weight[columns], bias, self.softcap, z)

    def drop_(self, z: Tensor, rows: Rows, floor: Tensor | None) -> None:
        """Write −inf over the logits [n, W] that the policy does not keep; a row's target counts as recorded."""
        if floor is not None:
            drop_below_(z, floor[rows])
        elif self.kept_ids is not None and z.shape[1]:
            column, here = self.shard.local(torch.cat([self.kept_ids[rows], self.targets[rows][:, None]], 1))
            kept = torch.where(here, z.gather(1, column), -torch.inf)
            z.fill_(-torch.inf).scatter_reduce_(1, column, kept, "amax")

    def buffer(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        rows = min(rows, self.rows.count) * self.rows.parts
        return torch.empty(rows, columns, dtype=self.dtype if dtype is None else dtype, device=self.hidden.device)


def project_rows(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, out: Tensor) -> Tensor:
    """Write the logits [n, W] of hidden rows [n, D] to `out`, in its dtype."""
    project(hidden, weight, out)
    if bias is not None:
        out.add_(bias)
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    return out
