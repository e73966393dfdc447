"""Gradients of the LM head from those of its logits, kept or re-projected in tiles of rows and columns.

Under tensor parallelism the hidden states' gradient is summed while the weight's is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.groups import Pending, sum_start
from parallel_rl.vocab.backends.passes import OutputGrads, RowSpec, row_gradient
from parallel_rl.vocab.backends.torch_backend import rows_of
from parallel_rl.vocab.linear.forward import Forward, KeptLogits
from parallel_rl.vocab.linear.gemm import add_hidden_gradient, add_weight_gradient
from parallel_rl.vocab.linear.params import LinearParams, Rows, put_rows

if TYPE_CHECKING:
    from torch import Tensor

_SLOPE_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 23}  # logits whose soft-cap slope is held at once


class Summed(NamedTuple):
    """Gradients of flat hidden states [R, D], real weight rows [W, D] and bias [W]; None: not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Gradients:
    """Sums of the gradients of hidden states, weight and bias over spans of rows.

    Args:
        wanted: which of (hidden, weight, bias) to compute.
        weight: destination of the weight's gradient, [W, D] in float32 or wider; None makes a buffer.
        at_once: `add` is called once, so the weight's gradient needs no accumulation and has the operands' dtype.
    """

    def __init__(
        self, params: LinearParams, wanted: Sequence[bool], weight: Tensor | None = None, at_once: bool = False
    ) -> None:
        self.params = params
        of_hidden, of_weight, of_bias = wanted
        like = params.hidden
        new = like.new_empty if params.rows.order is None else like.new_zeros  # all rows are written, or some stay 0
        self.hidden = new(like.shape) if of_hidden else None
        self._blank = of_weight and weight is None  # the first product fills it without zeroing
        if self._blank:
            weight = torch.empty_like(params.weight, dtype=params.weight.dtype if at_once else params.dtype)
        self.weight = weight if of_weight else None
        self.bias = torch.zeros_like(params.bias, dtype=params.dtype) if of_bias and params.bias is not None else None
        self._under_way: list[tuple[Rows | None, Pending]] = []  # None: in place

    def add(
        self,
        spans: Sequence[slice],
        hidden: Tensor,
        columns: Sequence[slice],
        logits: Callable[[slice], tuple[Tensor, Tensor | None]],
        table: Tensor,
        upstream: OutputGrads,
    ) -> None:
        """Add the gradients of some rows, with `table` and `upstream` of all rows.

        Args:
            columns: all of them, in slices. logits: a slice → (logits to overwrite, their offsets or None).
        """
        params, rows = self.params, self.params.rows.gathered(*spans)
        table, upstream = table[rows], _rows_of(upstream, rows)

        def gradient(part: slice) -> Tensor:
            return _logits_gradient(params, *logits(part), params.spec(rows, part), table, upstream)

        self.add_products(spans, hidden, columns, gradient)

    def add_products(
        self, spans: Sequence[slice], hidden: Tensor, columns: Sequence[slice], gradient: Callable[[slice], Tensor]
    ) -> None:
        """Add the contributions of some rows; `gradient` maps each slice of columns to its logits' gradient."""
        params, of_hidden, in_place = self.params, None, False
        if self.hidden is not None:
            rows = params.rows.gathered(*spans)
            in_place = self.hidden.dtype == params.dtype and params.rows.parts == 1 and isinstance(rows, slice)
            of_hidden = self.hidden[rows] if in_place else hidden.new_empty(hidden.shape, dtype=params.dtype)
        sending: list[tuple[Rows | None, Pending]] = []
        for part in columns:
            dz = gradient(part)
            if of_hidden is not None:
                add_hidden_gradient(of_hidden, dz, params.weight[part], blank=part is columns[0])
                if part is columns[-1]:
                    at = 0
                    for span in spans:
                        count = params.rows.parts * (span.stop - span.start)
                        of_span = sum_start(of_hidden[at : at + count], params.shard.group, params.scatter)
                        sending.append((None if in_place else params.rows.local(span), of_span))
                        at += count
            if self.weight is not None:
                add_weight_gradient(self.weight[part], dz, hidden, self._blank)
            if self.bias is not None:
                self.bias[part].add_(dz.sum(0, dtype=self.bias.dtype))
            del dz  # frees its memory before the next
        self._blank = False
        self._arrive()
        self._under_way = sending

    def close(self) -> Summed:
        """Wait for pending sums and return all."""
        self._arrive()
        if self._blank and self.weight is not None:
            self.weight.zero_()
        return Summed(self.hidden, self.weight, self.bias)

    def _arrive(self) -> None:
        for rows, part in self._under_way:
            summed = part.wait()
            if rows is not None:
                assert self.hidden is not None
                put_rows(self.hidden, rows, summed)
        self._under_way = []


def _logits_gradient(
    params: LinearParams, z: Tensor, tops: Tensor | None, spec: RowSpec, table: Tensor, upstream: OutputGrads
) -> Tensor:
    """Return the gradient of logits minus `tops`, in the products' dtype; in place if it is no wider."""
    low = params.weight.dtype
    if params.grad_in_operand_dtype:
        out = z.view(low) if z.element_size() == low.itemsize else torch.empty_like(z, dtype=low)
        return row_gradient(z, spec, table, upstream, out, params.shard.backend, tops)
    if params.softcap is None:
        row_gradient(z, spec, table, upstream, z, params.shard.backend)
    else:
        block = max(1, _SLOPE_BLOCK.get(z.device.type, _SLOPE_BLOCK["cuda"]) // max(z.shape[1], 1))
        for start in range(0, z.shape[0], block):
            part = slice(start, start + block)
            inv_t = rows_of(spec.inv_t, part)
            of_part = spec._replace(targets=spec.targets[part], keep=spec.keep[part], inv_t=inv_t)
            block_logits = z[part]
            slope = (1 - (block_logits / params.softcap).square_()).clamp_(min=0)  # 0 where a logit was dropped
            row_gradient(
                block_logits, of_part, table[part], _rows_of(upstream, part), block_logits, params.shard.backend
            ).mul_(slope)
    return z if z.device.type == "cpu" else z.to(low)


def _rows_of(upstream: OutputGrads, rows: Tensor | slice) -> OutputGrads:
    a, b, c = (None if g is None else g[rows] for g in upstream)
    return a, b, c


def run_backward(params: LinearParams, forward: Forward, upstream: OutputGrads, gradients: Gradients) -> Summed:
    """Sum `gradients` over all rows; kept logits are used up, others re-projected."""
    rows, columns = params.plan.tile
    valid, truncated = params.shard.valid, bool(params.shard.truncation)
    slices = [slice(at, min(at + columns, valid)) for at in range(0, max(valid, 1), columns)]
    if truncated:  # its threshold is the row's
        slices, columns = [params.columns], valid
    buffer = None if params.plan.resident else params.buffer(rows, columns)
    for index, (span, hidden, _) in enumerate(params.fetched(backward_spans(params))):
        if buffer is None:
            kept, forward.kept[index] = forward.kept[index], None
            gradients.add(
                [span], hidden, [params.columns], partial(_kept_logits, params, kept), forward.table, upstream
            )
            del kept  # frees its memory
        else:
            dropped = params.rows.gathered(span) if truncated else None
            again = partial(_logits_again, params, hidden, buffer, forward.floor, dropped)
            gradients.add([span], hidden, slices, again, forward.table, upstream)
    return gradients.close()


def backward_spans(params: LinearParams) -> list[slice]:
    """Return the groups of kept rows, or the rows of each pass over the columns."""
    return params.rows.spans(params.plan.group if params.plan.resident else params.plan.tile[0])


def _kept_logits(params: LinearParams, kept: KeptLogits | None, _: slice) -> tuple[Tensor, Tensor | None]:
    assert kept is not None
    if kept.tops is None or params.grad_in_operand_dtype:
        return kept.values, kept.tops
    return kept.values.to(kept.tops.dtype).add_(kept.tops), None


def _logits_again(
    params: LinearParams, hidden: Tensor, buffer: Tensor, floor: Tensor | None, dropped: Rows | None, columns: slice
) -> tuple[Tensor, None]:
    z = params.logits(hidden, buffer, columns)
    if dropped is not None:
        params.drop_(z, dropped, floor)
    return z, None
