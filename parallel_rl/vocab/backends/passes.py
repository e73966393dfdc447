"""The three steps of the token statistics on any backend, and further targets of a prefix tree's branching rows.

The targets of a row share its maximum and sums; only their logits differ. So X numbers are gathered in addition, and X
gradient entries replace those of the pass, which treats such a row as without target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.segments import sum_segments
from parallel_rl.vocab.backends.choice import Backend, runs_on_triton
from parallel_rl.vocab.backends.torch_backend import (
    combine_parts,
    combine_squares,
    compiles,
    even_blocks,
    logits_gradient,
    row_blocks,
    rows_of,
    shard_grad,
    shard_stats,
)

if TYPE_CHECKING:
    from torch import Tensor

#: gradients [T] of a loss with respect to (log-prob, entropy, lse); None is zero
OutputGrads = tuple["Tensor | None", "Tensor | None", "Tensor | None"]

#: (log-prob, entropy, lse, Σπ²) [T] of some rows, and `row_gradient`'s [T, 2 or 3]
CombinedRows = tuple["Tensor", "Tensor | None", "Tensor", "Tensor | None", "Tensor"]


class RowSpec(NamedTuple):
    """Inputs of each row besides its logits, and the shard's columns."""

    targets: Tensor  # [T] global ids
    keep: Tensor  # [T] bool; other rows may hold anything, and get zeros
    inv_t: Tensor  # [T, 1] or [1, 1] 1 / temperature
    start: int  # the first column's id
    valid: int  # real columns; later ones are padding


class HalfLogits(NamedTuple):
    """Float32 logits in half the bytes, for Triton's passes only; rows that are not kept hold anything."""

    values: Tensor  # [T, W] float16 distances from the tops, columns side by side
    tops: Tensor  # [T, ⌈W / PER_TOP⌉] float32, the maximum of each PER_TOP columns


def row_parts(
    z: Tensor, spec: RowSpec, entropy: bool, backend: Backend, squares: bool = False, half: HalfLogits | None = None
) -> Tensor:
    """Reduce [T, W] logits to this shard's parts [T, 3 + entropy + squares] (m, a, t, b, q) to gather.

    `squares` adds q, for Σπ², and requires the entropy; `half` stores the logits of kept rows.
    """
    if half is not None:
        from parallel_rl.vocab.backends.triton.operators import vocab_stats_half

        return vocab_stats_half(z, *spec, entropy, squares, *half)
    if runs_on_triton(z, backend):
        from parallel_rl.vocab.backends.triton.operators import vocab_stats

        return vocab_stats(z, *spec, entropy, squares)
    return shard_stats(z[:, : spec.valid], local_column(spec), spec.inv_t, entropy, backend, squares)


def truncated_row_parts(
    z: Tensor,
    floor: Tensor,
    spec: RowSpec,
    entropy: bool,
    backend: Backend,
    squares: bool = False,
    kept: Tensor | None = None,
    half: HalfLogits | None = None,
) -> Tensor:
    """Compute `row_parts` of the logits ≥ each row's floor [T, 1]; write −inf over the others.

    `kept` [T, W] takes the result in place of `z`. A CPU reads the logits once.
    """
    out = z if kept is None else kept
    if z.device.type != "cpu" or half is not None or torch.compiler.is_compiling() or not z.numel():
        drop_below_(z[:, : spec.valid], floor, None if kept is None else kept[:, : spec.valid])
        return row_parts(out, spec, entropy, backend, squares, half)
    of_block: Backend = "compiled" if compiles(z, backend) else "eager"
    columns, parts = local_column(spec), []
    for rows in even_blocks(z, 1 << 16, least=8):
        real = out[rows, : spec.valid]
        drop_below_(z[rows, : spec.valid], floor[rows], None if kept is None else real)
        inv_t = rows_of(spec.inv_t, rows)
        parts.append(shard_stats(real, columns[rows], inv_t, entropy, of_block, squares))
    return torch.cat(parts)


def drop_below_(z: Tensor, floor: Tensor, kept: Tensor | None = None) -> None:
    """Write −inf over logits [T, W] below each row's floor [T, 1] (`kept_floor`), or copy to `kept` first."""
    for rows in row_blocks(z):  # no mask of all rows is made
        if kept is not None:
            kept[rows] = z[rows]
        (z if kept is None else kept)[rows].masked_fill_(z[rows] < floor[rows], -torch.inf)


def row_stats(
    z: Tensor, spec: RowSpec, entropy: bool, backend: Backend, squares: bool = False, half: HalfLogits | None = None
) -> CombinedRows:
    if half is not None:
        from parallel_rl.vocab.backends.triton.operators import vocab_row_stats_half

        return _used(vocab_row_stats_half(z, *spec, entropy, squares, *half), entropy, squares)
    if runs_on_triton(z, backend):
        from parallel_rl.vocab.backends.triton.operators import vocab_row_stats

        return _used(vocab_row_stats(z, *spec, entropy, squares), entropy, squares)
    return combine_rows(row_parts(z, spec, entropy, backend, squares)[None], spec, backend)


def combine_rows(parts: Tensor, spec: RowSpec, backend: Backend) -> CombinedRows:
    """Combine parts [ranks, T, 3 to 5] to (log-prob, entropy, lse, Σπ²) [T] and rows (M, log A, H)."""
    entropy, squares = parts.shape[-1] > 3, parts.shape[-1] > 4
    if runs_on_triton(parts, backend):
        from parallel_rl.vocab.backends.triton.operators import vocab_combine

        return _used(vocab_combine(parts, spec.keep, spec.inv_t), entropy, squares)
    top, log_a, t, ent = combine_parts(parts, spec.inv_t, entropy)
    zero = torch.zeros((), dtype=top.dtype, device=top.device)
    logprobs = torch.where(spec.keep, t - log_a, zero)
    lse = torch.where(spec.keep, top * spec.inv_t[:, 0] + log_a, zero)
    if ent is None:
        return logprobs, None, lse, None, torch.stack([top, log_a], dim=1)
    sums = torch.where(spec.keep, combine_squares(parts, spec.inv_t, top, log_a), zero) if squares else None
    return logprobs, torch.where(spec.keep, ent, zero), lse, sums, torch.stack([top, log_a, ent], dim=1)


def _used(results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], entropy: bool, squares: bool) -> CombinedRows:
    logprobs, entropies, lse, rows, sums = results
    return logprobs, entropies if entropy else None, lse, sums if squares else None, rows


def row_gradient(
    z: Tensor,
    spec: RowSpec,
    rows: Tensor,
    upstream: OutputGrads,
    out: Tensor | None,
    backend: Backend,
    tops: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of the logits [T, W].

    Args:
        rows: [T, 2 or 3] of `combine_rows`. tops: of `HalfLogits`, if `z` are their values.
        out: destination: `z` itself, a tensor of any floating dtype, or None for a new one like `z`. Triton's passes may also
            write over the bytes of `z` in a dtype of the same width.
    """
    assert tops is None or (runs_on_triton(z, backend) and out is not None and out is not z)
    if runs_on_triton(z, backend):
        from parallel_rl.vocab.backends.triton.operators import vocab_gradient, vocab_gradient_, vocab_gradient_to

        # not spec[:3]: torch 2.8 does not trace a slice of a named tuple
        operands = (spec.targets, spec.keep, spec.inv_t, rows, *upstream, spec.start, spec.valid)
        if out is None:
            return vocab_gradient(z, *operands)
        if out is z:
            vocab_gradient_(z, *operands)
        else:
            vocab_gradient_to(z, *operands, out, tops)
        return out
    table, at_target = row_coefficients(spec, rows, upstream)
    real = to = z[:, : spec.valid]
    if out is not z:
        out = torch.empty_like(z, memory_format=torch.contiguous_format) if out is None else out
        to = out[:, : spec.valid]
    shard_grad(real, local_column(spec), spec.inv_t, table, at_target, spec.keep, to, backend)
    out[:, spec.valid :] = 0
    return out


def row_coefficients(spec: RowSpec, rows: Tensor, upstream: OutputGrads) -> tuple[Tensor, Tensor]:
    """Return the `rows` and `ct` of `shard_grad`."""
    zero, (g_logprobs, g_entropy, g_lse) = torch.zeros_like(rows[:, 0]), upstream
    g_logprobs, g_lse = zero if g_logprobs is None else g_logprobs, zero if g_lse is None else g_lse
    scale = spec.inv_t[:, 0]
    if g_entropy is None:
        coefficients = [(g_lse - g_logprobs) * scale]
    else:
        coefficients = [(g_lse - g_logprobs - g_entropy * rows[:, 2]) * scale, -g_entropy * scale]
    return torch.stack([rows[:, 0], rows[:, 1], *coefficients], dim=1), g_logprobs * scale


def local_column(spec: RowSpec) -> Tensor:
    """Return the column [T] of each target on this shard, −1 if another shard holds it."""
    local = spec.targets - spec.start
    return torch.where((local >= 0) & (local < spec.valid), local, -1)


class Branches(NamedTuple):
    """Further targets of X rows in a backward."""

    rows: Tensor  # [X] in order
    bounds: Tensor  # [T + 1] of the further targets of each row
    columns: Tensor  # [X] on this shard, −1 if another holds it
    upstream: Tensor  # [X] gradients of the log-probs


class Entries(NamedTuple):
    """Entries of the logits' gradient: values [X] at places ([X], [X])."""

    places: tuple[Tensor, Tensor]
    values: Tensor


def with_branches(spec: RowSpec, branches: Tensor) -> RowSpec:
    """Extend the spec of T rows by the rows [X] of the further targets, already in `spec.targets` [T + X]."""
    inv_t = spec.inv_t if len(spec.inv_t) == 1 else torch.cat([spec.inv_t, spec.inv_t[branches]])
    return spec._replace(keep=torch.cat([spec.keep, spec.keep[branches]]), inv_t=inv_t)


def branch_parts(z: Tensor, parts: Tensor, spec: RowSpec, branches: Tensor) -> Tensor:
    """Make the parts [X, 3 to 5] of the further targets from those of their rows; see `row_parts`."""
    columns = local_column(spec)[len(z) :]
    further = parts[branches]
    top = torch.where(further[:, 0] == -torch.inf, 0.0, further[:, 0])
    if z.shape[1]:
        distance = (z[branches, columns.clamp(min=0)].to(parts.dtype) - top) * _scale(spec.inv_t, branches)
        further[:, 2] = torch.where(columns >= 0, distance, -torch.inf)
    return further


def split_edges(
    spec: RowSpec, branches: Tensor, upstream: Tensor | None, number: int
) -> tuple[RowSpec, Branches | None, Tensor | None]:
    """Split targets and log-prob gradients [T + X] into those of T rows and the further ones."""
    rows = spec._replace(targets=spec.targets[:number])
    if upstream is None:
        return rows, None, None
    columns, further = local_column(spec)[number:], upstream[number:]
    bounds = torch.searchsorted(branches, torch.arange(number + 1, device=branches.device))
    summed = upstream[:number] + sum_segments(further, bounds, branches).to(upstream.dtype)
    return rows, Branches(branches, bounds, columns, further), summed


def branch_gradient(z: Tensor, spec: RowSpec, rows: Tensor, upstream: OutputGrads, further: Branches) -> Entries | None:
    """Compute the gradient at the further targets, rounded once; None for an empty shard.

    A target of another shard maps to column 0 of its row, and writes the value that column 0 has anyway.
    """
    if not z.shape[1] or not spec.valid:
        return None
    table, _ = row_coefficients(spec, rows, upstream)
    at, columns = further.rows, further.columns.clamp(min=0)
    added = further.upstream * _scale(spec.inv_t, at)
    first = torch.where(further.columns == 0, added, 0.0)
    of_row = sum_segments(first, further.bounds, at).to(added.dtype)
    added = torch.where(columns == 0, of_row[at], added)
    passed = logits_gradient(z[at, columns][:, None], rows_of(spec.inv_t, at), table[at], spec.keep[at])[:, 0]
    return Entries((at, columns), passed + torch.where(spec.keep[at], added, 0.0))


def _scale(inv_t: Tensor, rows: Tensor) -> Tensor:
    return rows_of(inv_t, rows)[:, 0]
