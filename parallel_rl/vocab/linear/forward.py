"""Forward of the LM head: statistics of chunks of whole rows, whose logits may be kept to multiply many at once.

Under tensor parallelism two transfers overlap the products: the next chunk's hidden states are gathered (sequence
parallelism), and a chunk's statistics are exchanged while the next one is projected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.groups import Pending, all_gather_start, group_size
from parallel_rl.vocab.backends.passes import HalfLogits, combine_rows, row_parts, row_stats, truncated_row_parts
from parallel_rl.vocab.linear.params import LinearParams, RowStats, put_rows
from parallel_rl.vocab.threshold import kept_floor

if TYPE_CHECKING:
    from torch import Tensor


class Forward(NamedTuple):
    """[N] statistics, [N, 2 or 3] values for the gradient, and the kept logits, group by group."""

    stats: RowStats
    table: Tensor
    floor: Tensor | None  # [N, 1] the smallest kept logit, under top-k and top-p
    kept: list[KeptLogits | None]


class KeptLogits(NamedTuple):
    """Kept logits [n, W] of a span, less `tops` [n, 1] or [n, ⌈W / PER_TOP⌉] (`HalfLogits`), if any."""

    span: slice
    values: Tensor
    tops: Tensor | None


class Chunks(NamedTuple):
    """Rows with whole logits: [n, D] hidden states and logits [n, W], less `tops`, span after span."""

    spans: list[slice]
    hidden: Tensor
    logits: Tensor
    tops: Tensor | None


class _Chunk(NamedTuple):
    span: slice
    rows: int  # of all parts
    stats: Pending | tuple[Tensor | None, ...]  # pending parts of all ranks, or one rank's combined statistics


def run_forward(params: LinearParams, then: Callable[[Chunks, Forward], None] | None = None) -> Forward:
    """Compute statistics of every row with loss; the others get zeros.

    `then` is called with (chunks, results so far) once `params.rows_together` rows are known. It may overwrite the logits.
    """
    total, plan, shard = params.targets.shape[0], params.plan, params.shard
    zeros = torch.zeros(4, total, dtype=params.dtype, device=params.hidden.device)
    stats = zeros[0], zeros[2] if shard.entropy else None, zeros[1], zeros[3] if shard.sum_pi_squared else None
    table = zeros.new_zeros(total, 3 if shard.entropy else 2)
    by_rank = bool(shard.truncation) and params.kept_ids is None
    out = Forward(stats, table, table.new_zeros(total, 1) if by_rank else None, [])

    def arrive(chunk: _Chunk) -> None:
        rows, of_chunk = params.rows.gathered(chunk.span), chunk.stats
        if isinstance(of_chunk, Pending):
            gathered = of_chunk.wait().view(-1, chunk.rows, 3 + shard.entropy + shard.sum_pi_squared)
            of_chunk = combine_rows(gathered, params.spec(rows, params.columns), shard.backend)
        for target, part in zip((*out.stats, table), of_chunk, strict=True):
            if target is not None and part is not None:
                put_rows(target, rows, part)

    spans = params.rows.spans(plan.size)
    # one is projected while the other's numbers are exchanged
    count = 2 if group_size(shard.group) > 1 and len(spans) > 1 else 1
    keeps = plan.resident or (then is not None and plan.group > plan.size)
    in_place = keeps and params.kept_dtype == params.dtype  # projected where they are kept
    places = 1 if keeps else count  # kept logits are not read again before the backward
    buffer = params.buffer(0 if in_place else places * plan.size, shard.valid)
    together = 1 if then is None else params.rows_together
    waiting: list[_Chunk] = []
    group: list[slice] = []
    for index, (span, hidden, of_group) in enumerate(params.fetched(spans, together, params.masked)):
        place = None if in_place else buffer[index % places * plan.size * params.rows.parts :]
        waiting.append(_chunk(params, span, hidden, place, out, keeps))
        group.append(span)
        complete = then is not None and (span.stop % together == 0 or index + 1 == len(spans))
        while len(waiting) >= (1 if complete else count):
            arrive(waiting.pop(0))
        if then is not None and complete:
            values, tops = (buffer, None) if not keeps else out.kept.pop()[1:]  # type: ignore[index]
            then(Chunks(group, of_group, values[: len(of_group)], tops), out)
            group = []
    while waiting:
        arrive(waiting.pop(0))
    return out


def _chunk(
    params: LinearParams, span: slice, hidden: Tensor, place: Tensor | None, out: Forward, keeps: bool
) -> _Chunk:
    """Project a chunk to `place`, or where its logits are kept, and compute its statistics."""
    shard, rows = params.shard, params.rows.gathered(span)
    kept = _reserve(params, out.kept, span) if keeps else None
    if place is None:
        assert kept is not None
        place = kept.values
    z, spec = params.logits(hidden, place, params.columns), params.spec(rows, params.columns)
    half = HalfLogits(*kept[1:]) if kept is not None and params.grad_in_operand_dtype else None  # type: ignore[arg-type]
    outputs, parts = (shard.entropy, shard.backend, shard.sum_pi_squared), None
    if out.floor is None:
        params.drop_(z, rows, None)
        if group_size(shard.group) > 1:
            parts = row_parts(z, spec, *outputs, half)
    else:
        floor = kept_floor(z, shard.at(rows))
        put_rows(out.floor, rows, floor)
        parts = truncated_row_parts(z, floor, spec, *outputs, half=half)
    result: Pending | tuple[Tensor | None, ...]
    if parts is None:  # a row's splits are combined at once
        result = combined = row_stats(z, spec, *outputs, half)
        top = combined[4][:, :1]
    else:
        result, top = all_gather_start(parts, shard.group), parts[:, :1]
    if half is None and kept is not None and kept.tops is not None:
        torch.clamp(top, min=torch.finfo(top.dtype).min, out=kept.tops)  # a row of −inf stays −inf
        torch.sub(z, kept.tops, out=kept.values)
    return _Chunk(span, len(hidden), result)


def _reserve(params: LinearParams, kept: list[KeptLogits | None], span: slice) -> KeptLogits:
    """Reserve memory for a chunk's logits: in the buffer being filled, or in a new one."""
    plan, parts = params.plan, params.rows.parts
    last = kept[-1] if kept else None
    if last is None or span.start >= last.span.stop:
        end = min(span.start + plan.group, params.rows.count)
        values = params.buffer(end - span.start, params.shard.valid, params.kept_dtype)
        low = params.kept_dtype != params.dtype
        tops = params.buffer(end - span.start, params.tops_per_row) if low else None
        last = KeptLogits(slice(span.start, end), values, tops)
        kept.append(last)
    here = slice(parts * (span.start - last.span.start), parts * (span.stop - last.span.start))
    return KeptLogits(span, last.values[here], None if last.tops is None else last.tops[here])
