"""One optimizer step's loss on one rank of a layout, every place that carries no loss poisoned."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.counts import count_valid
from parallel_rl.groups import ParallelGroups
from parallel_rl.losses.core.base import LossFn
from parallel_rl.metrics import reduce_metrics
from parallel_rl.packing import SequencePackingLossWrapper
from parallel_rl.testing.batches import POISON, ROWS, VOCAB, WIDTH, carries_loss, local_names, poisoned
from parallel_rl.testing.cases import Batch, Case, Expected, step_statistics
from parallel_rl.testing.layouts import Layout, Piece, cut_rows, make_groups


class Outcome(NamedTuple):
    share: float
    metrics: dict[str, float]
    squared_error: float  # of this rank's piece of the gradient
    stray: str  # a gradient where none may be
    place: tuple[int, int, int]


def run_layout(
    layout: Layout,
    case: Case,
    batch: Batch,
    want: Expected,
    groups: ParallelGroups,
    place: tuple[int, int, int],
    dtype: torch.dtype,
) -> Outcome:
    """One optimizer step's loss on this rank, with every masked place poisoned."""
    tp_rank, cp_rank, dp_rank = place
    scalar = batch.logits.shape[-1] == 1
    loss_fn, columns = sharded_loss(case, layout, tp_rank, scalar, consume=layout.micro_batches > 1)
    dirty = poisoned(batch.data, case)
    kind = torch.promote_types(dtype, torch.float32)  # data is never in low precision
    data = {name: value.to(kind) if value.dtype == torch.float64 else value for name, value in dirty.items()}
    mine = list(range(ROWS))[dp_rank * ROWS // layout.dp : (dp_rank + 1) * ROWS // layout.dp]
    size = len(mine) // layout.micro_batches
    pieces = [cut_rows(mine[i : i + size], batch.lengths, WIDTH, layout, cp_rank) for i in range(0, len(mine), size)]
    datas = [
        {name: value[piece.rows] for name, value in data.items() if name not in local_names(loss_fn)}
        for piece in pieces
    ]
    counts = count_valid(datas, groups.data)
    carries = carries_loss(batch.data, case)
    arguments, leaves, losses = [], [], []
    for piece, local in zip(pieces, datas, strict=True):
        leaf = local_logits(batch.logits, piece, columns, carries).to(dtype).requires_grad_()
        shape = (len(piece.rows), -1) if piece.cu_seqlens is None else (1, -1)
        leaves.append(leaf)
        for name in local_names(loss_fn):  # it comes in the order and on the shard of the logits
            local[name] = local_logits(data[name], piece, columns, carries).view(*shape, len(columns))
        head = (leaf * 1.0).view(*shape, leaf.shape[-1])
        arguments.append((head, local, *counts, groups.tp_rank, groups.tensor, groups.context))
        losses.append(
            loss_fn
            if piece.cu_seqlens is None
            else SequencePackingLossWrapper(loss_fn, piece.cu_seqlens, piece.cu_seqlens_padded)
        )
    statistics = step_statistics([*zip(losses, arguments, strict=True)], groups)
    share, metrics, squared, stray = 0.0, [], 0.0, ""
    for fn, call, leaf, piece in zip(losses, arguments, leaves, pieces, strict=True):
        loss, parts = fn(*call, statistics=statistics)
        loss.backward()
        share += loss.item()
        metrics.append(parts)
        assert leaf.grad is not None
        truth = local_logits(want.gradient, piece, columns, carries, poison=False)
        squared += (leaf.grad.double() - truth).square().sum().item()
        if bool((leaf.grad[truth == 0] != 0).any()):
            stray = f"{layout.name}: a masked place or a padding column has a gradient"
    reduced = {name: value.item() for name, value in reduce_metrics(metrics, groups).items()}
    return Outcome(share, reduced, squared, stray, place)


def sharded_loss(
    case: Case, layout: Layout, tp_rank: int, scalar: bool, consume: bool
) -> tuple[LossFn, list[int | None]]:
    """The loss and the global column of each local one (None: padding)."""
    if scalar:
        return case.build(cp_layout=layout.cp_layout), [0]
    if layout.packing == "packed":  # torch.chunk's uneven shards
        chunk = -(-VOCAB // layout.tp)
        columns: list[int | None] = list(range(tp_rank * chunk, min((tp_rank + 1) * chunk, VOCAB)))
    else:  # even shards; with tp 4 the last one is nothing but padding
        width = {1: 24, 2: 12, 4: 8}[layout.tp] if layout.packing == "padded" else -(-(VOCAB + 5) // layout.tp)
        columns = [c if c < VOCAB else None for c in range(tp_rank * width, (tp_rank + 1) * width)]
    return case.build(vocab_size=VOCAB, cp_layout=layout.cp_layout, consume_logits=consume), columns


def local_logits(
    whole: Tensor, piece: Piece, columns: list[int | None], carries: Tensor, poison: bool = True
) -> Tensor:
    """[T_local, width] of a [ROWS, WIDTH, V] tensor; NaN and inf at masked places, wild numbers in padding columns."""
    real = [c for c in columns if c is not None]
    rows, places, there = piece.indices()
    there = there & carries[rows, places]
    out = whole.new_full((len(piece.places), len(columns)), 1e4 if poison else 0.0)
    if poison:
        out[:] = torch.where(there[:, None], out, torch.tensor(POISON).repeat(len(out))[: len(out), None].to(whole))
    out[:, : len(real)] = torch.where(there[:, None], whole[rows, places][:, real], out[:, : len(real)])
    return out


def check_world(
    rank: int, of_world: list[Layout], given: list[tuple[Case, Batch, Expected]], dtype: torch.dtype
) -> list[tuple[str, str, Outcome]]:
    """(case, layout, outcome), for every case on every one of these layouts."""
    world = dist.get_world_size()
    outcomes = []
    groups_of: dict[tuple[int, int], tuple[ParallelGroups, tuple[int, int, int]]] = {}
    for layout in of_world:
        key = (layout.tp, layout.cp)
        if key not in groups_of:
            groups_of[key] = make_groups(rank, world, layout.tp, layout.cp)
        for case, batch, want in given:
            outcomes.append(
                (case.name, layout.name, run_layout(layout, case, batch, want, *groups_of[key], dtype=dtype))
            )
    return outcomes
