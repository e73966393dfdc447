"""The passes of the LM head: statistics of chunks of whole rows, gradients of those or of tiles of rows and columns.

Under tensor parallelism three things run beside the products: the hidden states of the next chunk are gathered (sequence
parallelism), a chunk's statistics travel while the next one is projected, and its gradient of the hidden states is summed
while the gradient of the weight is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.groups import Pending, all_gather_start, group_size, sum_start
from parallel_rl.vocab.backends.passes import (
    OutputGrads,
    RowSpec,
    combine_rows,
    row_gradient,
    row_parts,
    row_stats,
    truncated_row_parts,
)
from parallel_rl.vocab.backends.torch_backend import rows_of
from parallel_rl.vocab.linear.gemm import add_hidden_gradient, add_weight_gradient
from parallel_rl.vocab.linear.params import LinearParams, RowStats
from parallel_rl.vocab.threshold import kept_floor

if TYPE_CHECKING:
    from torch import Tensor

_SLOPE_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 23}  # logits whose soft-cap slope is held at once


class Forward(NamedTuple):
    """[N] statistics, [N, 2 or 3] what the gradient needs of them, and the kept logits, group by group."""

    stats: RowStats
    table: Tensor
    floor: Tensor | None  # [N, 1] the smallest logit that a row keeps, under top-k and top-p
    kept: list[KeptLogits | None]


class KeptLogits(NamedTuple):
    """A span of the order: logits [n, W], less `top` [n, 1] where there is one."""

    span: slice
    values: Tensor
    top: Tensor | None


class Chunks(NamedTuple):
    """Rows with whole logits: [n, D] hidden states and [n, W] logits, span after span."""

    spans: list[slice]
    hidden: Tensor
    logits: Tensor


class _Chunk(NamedTuple):
    span: slice
    hidden: Tensor
    logits: Tensor
    stats: Pending | tuple[Tensor | None, ...]  # parts on the way to all ranks, or what one rank's are combined to


def run_forward(params: LinearParams, then: Callable[[Chunks, Forward], None] | None = None) -> Forward:
    """Compute statistics of every row that carries loss; the others get zeros.

    Args:
        then: called with (chunks, everything so far) once the chunks' statistics are known, of two chunks where ranks share the
            rows: it may write over the logits.
    """
    total, plan, whole, shard = params.targets.shape[0], params.plan, params.columns, params.shard
    zeros = torch.zeros(4, total, dtype=params.dtype, device=params.hidden.device)
    stats = zeros[0], zeros[2] if shard.entropy else None, zeros[1], zeros[3] if shard.sum_pi_squared else None
    table = zeros.new_zeros(total, 3 if shard.entropy else 2)
    by_rank = bool(shard.truncation) and params.kept_ids is None
    out = Forward(stats, table, table.new_zeros(total, 1) if by_rank else None, [])

    def finish(chunks: list[_Chunk]) -> None:
        for chunk in chunks:
            indices, made = params.rows.gathered(chunk.span), chunk.stats
            if isinstance(made, Pending):
                gathered = made.wait().view(-1, chunk.logits.shape[0], 3 + shard.entropy + shard.sum_pi_squared)
                made = combine_rows(gathered, params.spec(indices, whole), shard.backend)
            for target, part in zip((*out.stats, table), made, strict=True):
                if target is not None and part is not None:
                    target.index_copy_(0, indices, part)
        if then is not None and chunks:
            hidden = chunks[0].hidden if len(chunks) == 1 else torch.cat([chunk.hidden for chunk in chunks])
            then(Chunks([chunk.span for chunk in chunks], hidden, buffer[: len(hidden)]), out)

    spans = params.rows.spans(plan.size)
    overlap = group_size(shard.group) > 1 and len(spans) > 1
    count = 1 + overlap  # one is projected while the other's numbers travel
    in_place = plan.resident and params.kept_dtype == params.dtype  # they are projected where they are kept
    buffer = params.buffer(0 if in_place else count * plan.size, shard.valid)
    half = plan.size * params.rows.order.shape[0]
    waiting: list[_Chunk] = []
    for index, (span, hidden) in enumerate(params.fetched(spans)):
        kept = _reserve(params, out.kept, span) if plan.resident else None
        place = kept.values if kept is not None and kept.top is None else buffer[index % count * half :]
        z, indices = params.logits(hidden, place, whole), params.rows.gathered(span)
        spec, asked = params.spec(indices, whole), (shard.entropy, shard.backend, shard.sum_pi_squared)
        made: Pending | tuple[Tensor | None, ...]
        if out.floor is None:
            params.drop_(z, indices, None)
            parts = None if group_size(shard.group) == 1 else row_parts(z, spec, *asked)
        else:
            floor = kept_floor(z, shard.at(indices))
            out.floor.index_copy_(0, indices, floor.to(out.floor.dtype))
            parts = truncated_row_parts(z, floor, spec, *asked)
        if parts is None:  # a row's splits are combined at once
            made = combined = row_stats(z, spec, *asked)
            top = combined[4][:, :1]
        else:
            made, top = all_gather_start(parts, shard.group), parts[:, :1]
        if kept is not None and kept.top is not None:
            _keep(z, kept.values, kept.top, top)
        waiting.append(_Chunk(span, hidden, z, made))
        ready = len(waiting) - count + 1 if then is None else len(waiting) // count * count
        finish(waiting[:ready])
        waiting = waiting[ready:]
    finish(waiting)
    return out


def _reserve(params: LinearParams, kept: list[KeptLogits | None], span: slice) -> KeptLogits:
    """Reserve memory for a chunk's logits: a part of the buffer that is being filled, or of a new one at the list's end."""
    plan, parts = params.plan, params.rows.order.shape[0]
    last = kept[-1] if kept else None
    if last is None or span.start >= last.span.stop:
        end = min(span.start + plan.kept_together, params.rows.order.shape[1])
        values = params.buffer(end - span.start, params.shard.valid, params.kept_dtype)
        low = params.kept_dtype != params.dtype
        last = KeptLogits(slice(span.start, end), values, params.buffer(end - span.start, 1) if low else None)
        kept.append(last)
    here = slice(parts * (span.start - last.span.start), parts * (span.stop - last.span.start))
    return KeptLogits(span, last.values[here], None if last.top is None else last.top[here])


def _keep(z: Tensor, values: Tensor, top: Tensor, largest: Tensor) -> None:
    torch.clamp(largest, min=torch.finfo(top.dtype).min, out=top)  # a row of −inf stays one
    torch.sub(z, top, out=values)


class Summed(NamedTuple):
    """Gradients of the flat hidden states [R, D], of the weight's real rows [W, D] and of the bias [W]; None: not asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Gradients:
    """Sums of the gradients of hidden states, weight and bias over spans of rows.

    Args:
        wanted: which of (hidden, weight, bias) to compute.
        weight: where the weight's gradient is added, [W, D] in float32 or wider; None makes a buffer.
        at_once: there is one span, so that the weight's gradient is not accumulated and the buffer has the operands' dtype.
    """

    def __init__(
        self, params: LinearParams, wanted: Sequence[bool], weight: Tensor | None = None, at_once: bool = False
    ) -> None:
        self.params = params
        of_hidden, of_weight, of_bias = wanted
        self.hidden = torch.zeros_like(params.hidden) if of_hidden else None
        self._blank = of_weight and weight is None  # the first product fills it: no zeros are written and read
        if self._blank:
            weight = torch.empty_like(params.weight, dtype=params.weight.dtype if at_once else params.dtype)
        self.weight = weight if of_weight else None
        self.bias = torch.zeros_like(params.bias, dtype=params.dtype) if of_bias and params.bias is not None else None
        self._under_way: list[tuple[Tensor, Pending]] = []

    def add(
        self,
        spans: Sequence[slice],
        hidden: Tensor,
        columns: Sequence[slice],
        logits: Callable[[slice], tuple[Tensor, Tensor | None]],
        table: Tensor,
        upstream: OutputGrads,
    ) -> None:
        """Add the gradients of some rows.

        Args:
            columns: all of them, in slices.
            logits: a slice to (logits, what they lack or None), which are overwritten.
            table, upstream: of all rows.
        """
        params, indices = self.params, torch.cat([self.params.rows.gathered(span) for span in spans])
        table, upstream = table[indices], _rows_of(upstream, indices)

        def gradient(part: slice) -> Tensor:
            return _logits_gradient(params, *logits(part), params.spec(indices, part), table, upstream)

        self.add_products(spans, hidden, columns, gradient)

    def add_products(
        self, spans: Sequence[slice], hidden: Tensor, columns: Sequence[slice], gradient: Callable[[slice], Tensor]
    ) -> None:
        """Add what some rows give once the gradient of their logits is known.

        Args:
            columns: all of them, in slices.
            gradient: a slice to the gradient of those logits, in the dtype that the products take.
        """
        params, of_hidden = self.params, None
        if self.hidden is not None:
            of_hidden = torch.zeros(hidden.shape, dtype=params.dtype, device=hidden.device)
        sending: list[tuple[Tensor, Pending]] = []
        for part in columns:
            dz = gradient(part)
            if of_hidden is not None:
                add_hidden_gradient(of_hidden, dz, params.weight[part])
                if part is columns[-1]:
                    at = 0
                    for span in spans:
                        rows = len(params.rows.order) * (span.stop - span.start)
                        of_span = sum_start(of_hidden[at : at + rows], params.shard.group, params.scatter)
                        sending.append((params.rows.own(span), of_span))
                        at += rows
            if self.weight is not None:
                add_weight_gradient(self.weight[part], dz, hidden, self._blank)
            if self.bias is not None:
                self.bias[part].add_(dz.sum(0, dtype=self.bias.dtype))
        self._blank = False
        self._arrive()
        self._under_way = sending

    def close(self) -> Summed:
        """Wait for what is under way and return the sums."""
        self._arrive()
        if self._blank and self.weight is not None:
            self.weight.zero_()
        return Summed(self.hidden, self.weight, self.bias)

    def _arrive(self) -> None:
        for rows, part in self._under_way:
            assert self.hidden is not None
            self.hidden.index_copy_(0, rows, part.wait().to(self.hidden.dtype))
        self._under_way = []


def _logits_gradient(
    params: LinearParams, z: Tensor, top: Tensor | None, spec: RowSpec, table: Tensor, upstream: OutputGrads
) -> Tensor:
    """The gradient of logits less `top`, in the dtype that the products take; it lies over them if it is no wider."""
    low = params.weight.dtype
    if params.grad_in_operand_dtype:
        out = z.view(low) if z.element_size() == low.itemsize else torch.empty_like(z, dtype=low)
        table = table if top is None else torch.cat([table[:, :1] - top, table[:, 1:]], 1)
        return row_gradient(z, spec, table, upstream, out, params.shard.backend)
    if params.softcap is None:
        row_gradient(z, spec, table, upstream, z, params.shard.backend)
    else:
        block = max(1, _SLOPE_BLOCK.get(z.device.type, _SLOPE_BLOCK["cuda"]) // max(z.shape[1], 1))
        for start in range(0, z.shape[0], block):
            part = slice(start, start + block)
            inv_t = rows_of(spec.inv_t, part)
            of_part = spec._replace(targets=spec.targets[part], keep=spec.keep[part], inv_t=inv_t)
            some = z[part]
            slope = (1 - (some / params.softcap).square_()).clamp_(min=0)  # 0 where a logit was dropped
            row_gradient(some, of_part, table[part], _rows_of(upstream, part), some, params.shard.backend).mul_(slope)
    return z if z.device.type == "cpu" else z.to(low)


def _rows_of(upstream: OutputGrads, rows: Tensor | slice) -> OutputGrads:
    a, b, c = (None if g is None else g[rows] for g in upstream)
    return a, b, c


def run_backward(params: LinearParams, forward: Forward, upstream: OutputGrads, gradients: Gradients) -> Summed:
    """Sum up `gradients` over all rows; kept logits are used up, the others projected again."""
    rows, columns = params.plan.tile
    valid, truncated = params.shard.valid, bool(params.shard.truncation)
    slices = [slice(at, min(at + columns, valid)) for at in range(0, max(valid, 1), columns)]
    if truncated:  # its threshold is that of the row
        slices, columns = [params.columns], valid
    buffer = None if params.plan.resident else params.buffer(rows, columns)
    for index, (span, hidden) in enumerate(params.fetched(backward_spans(params))):
        if buffer is None:
            kept, forward.kept[index] = forward.kept[index], None
            gradients.add(
                [span], hidden, [params.columns], partial(_kept_logits, params, kept), forward.table, upstream
            )
            del kept  # its memory
        else:
            indices = params.rows.gathered(span) if truncated else None
            again = partial(_logits_again, params, hidden, buffer, forward.floor, indices)
            gradients.add([span], hidden, slices, again, forward.table, upstream)
    return gradients.close()


def backward_spans(params: LinearParams) -> list[slice]:
    """The groups of kept rows, or the rows of each pass over the columns."""
    return params.rows.spans(params.plan.kept_together if params.plan.resident else params.plan.tile[0])


def _kept_logits(params: LinearParams, kept: KeptLogits | None, _: slice) -> tuple[Tensor, Tensor | None]:
    assert kept is not None
    if kept.top is None or params.grad_in_operand_dtype:
        return kept.values, kept.top
    return kept.values.to(kept.top.dtype).add_(kept.top), None


def _logits_again(
    params: LinearParams, hidden: Tensor, buffer: Tensor, floor: Tensor | None, indices: Tensor | None, columns: slice
) -> tuple[Tensor, None]:
    z = params.logits(hidden, buffer, columns)
    if indices is not None:
        params.drop_(z, indices, floor)
    return z, None
