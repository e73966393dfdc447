"""Convert padded, listed or flat log-probs and fields to rows [B, A]; column t scores token t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from parallel_rl.groups import group_rank, group_size
from parallel_rl.layout import CPLayout, SequenceLayout
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parallel_rl.losses.core.requirements import Alignment

#: log-probs or a field: [B, S], flat [T], or [n_i] of each sequence; a width may follow
Values = Tensor | Sequence[Tensor]


class Rows(Protocol):
    """Form of log-probs and of their fields."""

    @property
    def number(self) -> int:
        """Return B, the number of sequences."""

    def shape_of(self, values: Values) -> object:
        """Return the shape in which the log-probs and every per-token field must agree."""

    def take(self, values: Values, alignment: Alignment = "token") -> Tensor:
        """Convert values to [B, A] or [B, A, K]; 0 where a row has no token."""

    def first(self, values: Values) -> Tensor:
        """Return [B] values at the first tokens that `take` leaves out; 0 if this rank has none."""


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """Rows [B, S]; `first_token` is 1 if column 0 is a sequence's first token, which nothing predicts."""

    shape: tuple[int, int]
    first_token: int

    @property
    def number(self) -> int:
        return self.shape[0]

    def shape_of(self, values: Values) -> object:
        return _tensor(values, "[B, S]").shape[:2]

    def take(self, values: Values, alignment: Alignment = "token") -> Tensor:
        rows = _tensor(values, "[B, S]")
        rows = rows[:, : self.shape[1] - self.first_token] if alignment == "predictor" else rows[:, self.first_token :]
        return rows if rows.shape[1] else _with_a_column(rows)

    def first(self, values: Values) -> Tensor:
        rows = _tensor(values, "[B, S]")
        return rows[:, 0] if self.first_token and rows.shape[1] else rows.new_zeros(self.number)


@dataclass(frozen=True, eq=False)
class ListedRows:
    """One tensor [n_i] a sequence."""

    lengths: tuple[int, ...]
    first_token: int

    @property
    def number(self) -> int:
        return len(self.lengths)

    def shape_of(self, values: Values) -> object:
        if isinstance(values, Tensor):
            raise ValueError(f"must be a list of [n_i] as the log-probs are, got a tensor {list(values.shape)}")
        for i, x in enumerate(values):
            if not isinstance(x, Tensor):
                raise ValueError(f"must be a list of tensors [n_i], got {type(x).__name__} at {i}")
        return tuple(x.shape[0] if x.dim() else -1 for x in values)

    def take(self, values: Values, alignment: Alignment = "token") -> Tensor:
        assert not isinstance(values, Tensor)
        end = -self.first_token if self.first_token and alignment == "predictor" else None
        start = 0 if alignment == "predictor" else self.first_token
        rows = pad_sequence([x[start:end] for x in values], batch_first=True)
        return rows if rows.shape[1] else _with_a_column(rows)

    def first(self, values: Values) -> Tensor:
        assert not isinstance(values, Tensor)
        return torch.stack([x[0] if len(x) and self.first_token else x.new_zeros(()) for x in values])


@dataclass(frozen=True, eq=False)
class FlatRows:
    """Sequences one after the other, [T].

    `index` and `there` [B, A]: the place of each row's tokens, and whether there is one. `skipped` [B]: the sequence's first
    token was left out before the row.
    """

    total: int
    index: Tensor
    there: Tensor
    skipped: Tensor

    @property
    def number(self) -> int:
        return self.index.shape[0]

    def shape_of(self, values: Values) -> object:
        return _tensor(values, "[T]").shape[:1]

    def take(self, values: Values, alignment: Alignment = "token") -> Tensor:
        flat = _tensor(values, "[T]")
        index = self.index - 1 if alignment == "predictor" else self.index
        if not self.total:
            return flat.new_zeros(*self.index.shape, *flat.shape[1:])
        rows = flat[index.clamp(0, self.total - 1)]
        return torch.where(self.there.view(*self.there.shape, *[1] * (rows.dim() - 2)), rows, 0)

    def first(self, values: Values) -> Tensor:
        flat = _tensor(values, "[T]")
        if not self.total:
            return flat.new_zeros(self.number)
        return torch.where(self.skipped, flat[(self.index[:, 0] - 1).clamp(0, self.total - 1)], 0)


@dataclass(frozen=True)
class Cut:
    """How rows lie on this rank: whole sequences or responses, and the ranks that split them."""

    responses: bool
    context_group: ProcessGroup | None
    cp_layout: CPLayout


def rows_of(logprobs: Values, cut: Cut, cu_seqlens: Tensor | None) -> Rows:
    """Find the form of the log-probs; ValueError for an unknown form or bounds that do not fit."""
    # both context layouts put the first token of each row on rank 0
    first = int(not cut.responses and group_rank(cut.context_group) == 0)
    if cu_seqlens is not None:
        if not isinstance(logprobs, Tensor) or logprobs.dim() != 1:
            got = f"{list(logprobs.shape)}" if isinstance(logprobs, Tensor) else f"a list of {len(logprobs)}"
            raise ValueError(f"cu_seqlens goes with flat log-probs [T], got {got}; leave it out")
        return _flat_rows(logprobs, cut, cu_seqlens)
    if not isinstance(logprobs, Tensor):
        for i, x in enumerate(logprobs):
            if not isinstance(x, Tensor) or x.dim() != 1:
                got = str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"a list of log-probs has one tensor [n_i] a sequence, got {got} at {i}")
        return ListedRows(tuple(len(x) for x in logprobs), first)
    if logprobs.dim() == 1:
        raise ValueError(f"flat log-probs [T = {len(logprobs)}] need cu_seqlens= [B + 1], the bounds of the sequences")
    if logprobs.dim() != 2:
        raise ValueError(f"log-probs must be [B, S], a list of [n_i], or flat [T], got {list(logprobs.shape)}")
    return PaddedRows((logprobs.shape[0], logprobs.shape[1]), first)


def _flat_rows(logprobs: Tensor, cut: Cut, cu_seqlens: Tensor) -> FlatRows:
    size, local = group_size(cut.context_group), logprobs.shape[0]
    bounds, drop = _checked_bounds(cu_seqlens, local * size), torch.zeros((), dtype=torch.int64)
    if size > 1:
        layout = SequenceLayout.packed(
            cu_seqlens, seq_len=local * size, total=local * size, tail=local * size - int(bounds[-1]), cp_size=size,
            cp_rank=group_rank(cut.context_group), cp_layout=cut.cp_layout, device=logprobs.device,
        )  # fmt: skip
        bounds = layout.offsets
        here = bounds[:-1].clamp(max=max(local - 1, 0))
        starts = layout.positions[here] == 0 if local else torch.zeros_like(here, dtype=torch.bool)
        drop = (starts & (bounds.diff() > 0)).long()
    else:
        bounds = bounds.to(logprobs.device)
        drop = (bounds.diff() > 0).long()
    if cut.responses:
        drop = torch.zeros_like(drop)
    lengths = bounds.diff() - drop
    columns = torch.arange(max(int(lengths.max()), 1), device=logprobs.device)
    return FlatRows(local, (bounds[:-1] + drop)[:, None] + columns, columns < lengths[:, None], drop > 0)


def _checked_bounds(cu_seqlens: Tensor, total: int) -> Tensor:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        got = list(cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens must be integers [B + 1] with B ≥ 1, got {got}")
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise ValueError(f"cu_seqlens must be integers [B + 1], got {cu_seqlens.dtype}")
    bounds = cu_seqlens.to(torch.int64)
    if not checks_values(cu_seqlens):
        return bounds
    if int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must start at 0 and not decrease, got {bounds.tolist()}")
    if int(bounds[-1]) > total:
        raise ValueError(f"cu_seqlens ends at {int(bounds[-1])}, beyond the {total} log-probs over all context ranks")
    return bounds


def _tensor(values: Values, shape: str) -> Tensor:
    if not isinstance(values, Tensor):
        raise ValueError(f"must be a tensor, got {type(values).__name__}; the log-probs are one, {shape}")
    return values


def _with_a_column(rows: Tensor) -> Tensor:
    """Pad [B, 0] to [B, 1] of zeros, so that a rank without a token keeps gradient and place."""
    return torch.nn.functional.pad(rows.movedim(1, -1), (0, 1)).movedim(-1, 1)


def row_layout(rows: Tensor, context_group: ProcessGroup | None) -> SequenceLayout:
    """Build the layout of rows [B, A] without a first token, split over `context_group` in any way."""
    return replace(SequenceLayout.padded(*rows.shape, device=rows.device), cp_size=group_size(context_group))
