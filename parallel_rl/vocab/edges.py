"""Further targets of branching rows of a prefix tree, in the two passes of the token statistics.

The targets of a row share its maximum and sums; only their logits differ. So X numbers are gathered in addition, and X
gradient entries replace those of the pass, which treats such a row as without target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.segments import sum_segments
from parallel_rl.vocab.backends.passes import OutputGrads, RowSpec, local_column, row_coefficients
from parallel_rl.vocab.backends.torch_backend import logits_gradient, rows_of

if TYPE_CHECKING:
    from torch import Tensor


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
