"""Map from local positions to tokens of sequences: padded and packed rows, both context-parallel layouts.

Every index is computed once, by tensor operations, without a host wait. Legend: B sequences, S tokens a row of the data,
T positions of the (packed) row, `local` this context rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from parallel_rl.groups import group_sum, reduce_
from parallel_rl.labels import is_shifted
from parallel_rl.segments import expand_segments, sum_segments
from parallel_rl.validation import checks_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.segments import SharedRows

CPLayout = Literal["zigzag", "contiguous"]


def valid_tokens(data: Mapping[str, Tensor], shift: bool = True) -> Tensor:
    """Return [B, S] bool: tokens that carry loss, without column 0, unless labels are shifted already.

    >>> data = {"token_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "sample_mask": torch.tensor([1, 0])}
    >>> valid_tokens(data).tolist()
    [[False, True, False], [False, False, False]]
    """
    mask = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    if not shift or is_shifted(data):
        return mask
    return torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Local positions of one context rank, in the order of its logits.

    A sequence's local positions are adjacent: sequence i holds `[offsets[i], offsets[i + 1])`.

    >>> layout = SequenceLayout.padded(1, 8, cp_size=2, cp_rank=0)  # zigzag: the first and the last quarter
    >>> layout.positions.tolist()
    [0, 1, 6, 7]
    >>> layout.shard(torch.arange(8)[None]).tolist()  # each position predicts the next token
    [1, 2, 7, 0]

    Attributes:
        shape: (B, S) of the whole data.
        sequence_ids: [T_local] the data row of each position.
        positions: [T_local] index in the (padded) sequence; at or beyond the true length it is padding.
        offsets: [B + 1] local segment bounds.
        lengths: [B] true lengths.
        local_shape: the leading shape of the logits, (B, S/cp) or (1, T/cp).
        chunks: [B] and [B], the cuts of sequences: position p lies in chunk (first + p) // second of 2·cp, or cp.
        tree: the rows that local positions share.
    """

    shape: tuple[int, int]
    sequence_ids: Tensor
    positions: Tensor
    offsets: Tensor
    lengths: Tensor
    local_shape: tuple[int, int]
    chunks: tuple[Tensor, Tensor]
    cp_size: int = 1
    tree: SharedRows | None = None

    @classmethod
    def padded(
        cls,
        batch_size: int,
        seq_len: int,
        *,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_layout: CPLayout = "zigzag",
        uneven: bool = False,
        device: torch.device | str | None = None,
    ) -> SequenceLayout:
        """Lay out rows of one length, logits [B, S/cp, V/tp]; `uneven` makes `torch.chunk`'s contiguous parts.

        ValueError: `seq_len` not divisible by 2·cp (zigzag) or cp (contiguous), a rank outside the group, an unknown layout.
        """
        _check_cp(cp_size, cp_rank, cp_layout)
        parts = _parts(cp_size, cp_layout)
        if seq_len % parts and not (uneven and cp_layout == "contiguous"):
            raise ValueError(
                f"sequence length {seq_len} is not divisible by {parts} ({_parts_text(cp_size, cp_layout)})"
            )
        part = -(-seq_len // parts)
        local = max(0, min(part, seq_len - cp_rank * part)) if uneven else seq_len // cp_size
        rows, place = torch.arange(batch_size, device=device), torch.arange(local, device=device)
        place = _zigzag(place, part, cp_size, cp_rank) if cp_layout == "zigzag" else place + cp_rank * part
        lengths = torch.full((batch_size,), seq_len, device=device)
        return cls(
            shape=(batch_size, seq_len),
            sequence_ids=rows.repeat_interleave(local, output_size=batch_size * local),
            positions=place.repeat(batch_size),
            offsets=torch.arange(batch_size + 1, device=device) * local,
            lengths=lengths,
            local_shape=(batch_size, local),
            chunks=(torch.zeros_like(lengths), torch.full_like(lengths, part)),
            cp_size=cp_size,
        )

    @classmethod
    def packed(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None = None,
        *,
        seq_len: int,
        total: int,
        tail: int = 0,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_layout: CPLayout = "zigzag",
        device: torch.device | str | None = None,
    ) -> SequenceLayout:
        """Lay out sequences one after the other in one row: the logits are [1, T/cp, V/tp].

        Zigzag cuts every padded sequence into 2·cp chunks; contiguous cuts the whole row into cp parts.

        Args:
            cu_seqlens: [B + 1] integer, cumulative true lengths from 0.
            cu_seqlens_padded: [B + 1] integer, the same with each sequence's padding; None: no padding.
            seq_len: S, the width of the unpacked data; a last sequence with the row's alignment padding may be longer.
            total: T, the padded length of the row over all context ranks.
            tail: positions at the end of the row that belong to no sequence; zigzag cuts them as a separate segment.
            device: of the layout; None is that of `cu_seqlens`. Bounds on the host are checked before they move.

        Raises:
            ValueError: shapes or dtypes; on host tensors also: not starting at 0, not increasing, a true length above its
                padded one, padded lengths not divisible by 2·cp, a last bound other than `total` − `tail`.
        """
        _check_cp(cp_size, cp_rank, cp_layout)
        padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        _check_cu_seqlens(cu_seqlens, padded, (total, tail), cp_size, cp_layout)
        count = cu_seqlens.numel() - 1
        where = cu_seqlens.device if device is None else device
        # copied without a host wait: host memory is read before the call returns
        bounds = padded.to(where, torch.int64, non_blocking=True)
        lengths = cu_seqlens.to(where, torch.int64, non_blocking=True).diff()
        local = total // cp_size
        place = torch.arange(local, device=bounds.device)
        if cp_layout == "zigzag" and cp_size > 1:
            offsets = (bounds // cp_size).clamp_(max=local)
            ids = torch.searchsorted(offsets[1:], place, right=True).clamp_(max=count - 1)
            start, size = offsets[ids], bounds.diff()[ids]
            positions = _zigzag(place - start, size // (2 * cp_size), cp_size, cp_rank)
            # past the last sequence the formula yields places of other ranks
            positions = torch.where(place < offsets[-1], positions, bounds[-1])
            chunks = torch.zeros_like(lengths), bounds.diff() // (2 * cp_size)
        else:  # one rank holds the row in order under any layout
            offsets = (bounds - cp_rank * local).clamp_(0, local)
            ids = torch.searchsorted(offsets[1:], place, right=True).clamp_(max=count - 1)
            positions = place + cp_rank * local - bounds[ids]
            chunks = bounds[:-1], torch.full_like(lengths, local)
        return cls(
            shape=(count, seq_len),
            sequence_ids=ids,
            positions=positions,
            offsets=offsets,
            lengths=lengths,
            local_shape=(1, local),
            chunks=chunks,
            cp_size=cp_size,
        )

    @cached_property
    def predicted(self) -> tuple[Tensor, Tensor]:
        """Return [T_local] flat index into [B, S] of each position's predicted token, and if there is one."""
        return self._index(self.positions + 1)

    @cached_property
    def held(self) -> tuple[Tensor, Tensor]:
        """Return [T_local] flat index into [B, S] of the token each position holds, and whether there is one."""
        return self._index(self.positions)

    def places(self, shift: bool = True) -> tuple[Tensor, Tensor]:
        """Return `predicted`, or without a shift `held`."""
        return self.predicted if shift else self.held

    def _index(self, column: Tensor) -> tuple[Tensor, Tensor]:
        valid = column < self.lengths.clamp(max=self.shape[1])[self.sequence_ids]
        last = max(self.shape[1] - 1, 0)  # of a row, for a position without a token
        return self.sequence_ids * self.shape[1] + column.clamp(max=last), valid

    def check_logits(self, logits: Tensor) -> None:
        """Check that logits are [*local_shape, V/tp]; else ValueError."""
        if logits.dim() != 3 or tuple(logits.shape[:2]) != self.local_shape:
            rows, width = self.local_shape
            raise ValueError(f"the logits have shape {list(logits.shape)}; the layout needs [{rows}, {width}, V/tp]")

    def shard(self, field: Tensor, shift: bool = True, fill: float | int | bool = 0) -> Tensor:
        """Put a whole, token-aligned field in the order of the local logits.

        Args:
            field: [B, S], or [B, S, K] with K values a token.
            shift: True puts `field[i, t + 1]` at the logits of token t, which predict it; False keeps `field[i, t]` there
                (what the model reads).
            fill: the value at positions without a token.

        Returns:
            [T_local], or [T_local, K].

        Raises:
            ValueError: a field of another shape.
        """
        local = self.take(field, shift)
        _, valid = self.places(shift)
        return torch.where(valid.view(-1, *[1] * (field.dim() - 2)), local, fill)

    def take(self, field: Tensor, shift: bool = True) -> Tensor:
        """Call `shard` for callers that mask: other positions hold anything; ValueError for another shape."""
        if tuple(field.shape[:2]) != self.shape:
            raise ValueError(f"the field has shape {list(field.shape)}; the layout has [B, S] = {list(self.shape)}")
        index, _ = self.places(shift)
        return field.reshape(-1, *field.shape[2:])[index]

    def unshard(self, local: Tensor, context_group: ProcessGroup | None = None, shift: bool = True) -> Tensor:
        """Invert `shard`: [T_local, ...] to [B, S, ...] on every context rank, 0 if nothing predicts a token."""
        index, valid = self.places(shift)
        full = local.new_zeros(self.shape[0] * self.shape[1] + 1, *local.shape[1:])
        full = full.index_put((torch.where(valid, index, len(full) - 1),), local)[:-1]
        return group_sum(full.view(*self.shape, *local.shape[1:]), context_group)

    def segment_sum(self, x: Tensor, context_group: ProcessGroup | None = None) -> Tensor:
        """Sum [T_local] over each sequence, over all context ranks: [B], in float64 inside, differentiable."""
        local = sum_segments(x, self.offsets, self.sequence_ids)
        return group_sum(local, context_group).to(x.dtype)

    def segment_max(self, x: Tensor, context_group: ProcessGroup | None = None) -> Tensor:
        """Return [B] each sequence's maximum over all context ranks, −inf for an empty one; no gradient."""
        most = x.new_full((self.shape[0],), -torch.inf).scatter_reduce(0, self.sequence_ids, x, "amax")
        return reduce_(most, context_group, dist.ReduceOp.MAX)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Expand [B] to [T_local], each sequence's value; the gradient is the local segment sum."""
        return expand_segments(per_sequence, self.offsets, self.sequence_ids)


def _parts(cp_size: int, cp_layout: CPLayout) -> int:
    # one rank holds the sequence in order under any layout
    return 1 if cp_size == 1 else 2 * cp_size if cp_layout == "zigzag" else cp_size


def _parts_text(cp_size: int, cp_layout: CPLayout) -> str:
    zigzag = f"2·cp = {2 * cp_size} chunks of the zigzag layout"
    return zigzag if cp_layout == "zigzag" else f"cp = {cp_size} contiguous parts"


def _zigzag(local: Tensor, chunk: Tensor | int, cp_size: int, cp_rank: int) -> Tensor:
    """Map local to sequence places: rank r holds chunks r and 2·cp − 1 − r."""
    if cp_size == 1:
        return local
    return torch.where(local < chunk, cp_rank * chunk + local, (2 * cp_size - 2 - cp_rank) * chunk + local)


def _check_cp(cp_size: int, cp_rank: int, cp_layout: str) -> None:
    if cp_layout not in ("zigzag", "contiguous"):
        raise ValueError(f"cp_layout = {cp_layout!r} is not valid; choose 'zigzag' or 'contiguous'")
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank = {cp_rank} must lie in [0, cp_size = {cp_size})")


def _check_cu_seqlens(cu: Tensor, padded: Tensor, row: tuple[int, int], cp_size: int, cp_layout: CPLayout) -> None:
    (total, tail), parts = row, _parts(cp_size, cp_layout)
    for name, bounds in (("cu_seqlens", cu), ("cu_seqlens_padded", padded)):
        if bounds.dim() != 1 or bounds.numel() < 2 or bounds.is_floating_point():
            raise ValueError(f"{name} must be integers [B + 1] with B ≥ 1, got {bounds.dtype} {list(bounds.shape)}")
    if padded.shape != cu.shape:
        raise ValueError(
            f"cu_seqlens_padded has {padded.numel()} bounds, cu_seqlens {cu.numel()}; their numbers must be equal"
        )
    if padded.device != cu.device:
        raise ValueError(
            f"cu_seqlens is on {cu.device}, cu_seqlens_padded on {padded.device}; they must be on one device"
        )
    if total % cp_size:
        raise ValueError(f"the packed row has {total} positions, which is not divisible by cp = {cp_size}")
    if not checks_values(cu):
        return
    for name, bounds in (("cu_seqlens", cu), ("cu_seqlens_padded", padded)):
        if int(bounds[0]) != 0 or bool((bounds.diff() < (1 if bounds is padded else 0)).any()):
            raise ValueError(f"{name} must start at 0 and increase, got {bounds.tolist()}")
    if bool((cu.diff() > padded.diff()).any()):
        raise ValueError(
            f"a sequence is longer than its padded length: cu_seqlens {cu.tolist()}, padded {padded.tolist()}"
        )
    if tail < 0 or int(padded[-1]) + tail != total:
        name = "cu_seqlens" if padded is cu else "cu_seqlens_padded"
        raise ValueError(
            f"{name} ends at {int(padded[-1])}; the packed row has {total} positions over all context ranks"
            + (f", {tail} of them in its tail" if tail else ", and tail= says how many of them belong to no sequence")
        )
    if cp_layout == "zigzag" and bool((padded.diff() % parts != 0).any()):
        raise ValueError(
            f"padded lengths {padded.diff().tolist()} are not divisible by {parts} ({_parts_text(cp_size, cp_layout)})"
        )
