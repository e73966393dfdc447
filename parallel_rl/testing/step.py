"""Calls of one optimizer step on one rank of a layout: data poisoned, counted and cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_rl.counts import ValidCounts, count_valid
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.metrics import Metrics
from parallel_rl.packing import PrefixTreeLossWrapper, SequencePackingLossWrapper
from parallel_rl.testing.batches import POISON, carries_loss, local_names, poisoned
from parallel_rl.testing.cases import Trial, step_statistics
from parallel_rl.testing.layouts import Layout, Piece, Rank, cut_rows
from parallel_rl.vocab.linear.lm_head import LMHeadInput


@dataclass(frozen=True)
class Step:
    """This rank's part of a step.

    Attributes:
        loss_fn: on this layout.
        columns: the global column of each local one (None: padding).
        pieces: the sources of local positions, per micro-batch.
        datas: data per micro-batch, with NaN, inf and wild ids at places without loss.
        counts: of the whole step.
        carries: [B, S] whether the output at a position of the whole batch matters to the loss.
        clean: no poison.
        rank: this process.
    """

    loss_fn: LossFunction
    columns: list[int | None]
    pieces: list[Piece]
    datas: list[dict[str, Tensor]]
    counts: ValidCounts
    carries: Tensor
    clean: bool
    rank: Rank

    def run(
        self, outputs: Sequence[Tensor | LMHeadInput], fields: Sequence[Mapping[str, LMHeadInput]] = ()
    ) -> Iterator[tuple[Tensor, Metrics]]:
        """Compute loss and metrics of each micro-batch, after the step's statistics.

        Args:
            outputs: of the model.
            fields: replace fields of `datas`, per micro-batch.
        """
        groups = self.rank.groups
        more = fields or [{} for _ in outputs]
        calls = []
        for output, data, given in zip(outputs, self.datas, more, strict=True):
            both: dict[str, Tensor | LMHeadInput] = {**data, **given}
            calls.append((output, both, *self.counts, groups.tp_rank, groups.tensor, groups.context))
        losses = [_packed(self.loss_fn, piece) for piece in self.pieces]
        statistics = step_statistics([*zip(losses, calls, strict=True)], groups)
        for loss_fn, call in zip(losses, calls, strict=True):
            yield loss_fn(*call, statistics=statistics)

    def local(self, whole: Tensor, piece: Piece, poison: bool = True) -> Tensor:
        """Cut a [B, S, V] tensor to this rank's columns, [T_local, width], see `local_positions`."""
        carries = torch.ones_like(self.carries) if self.clean else self.carries
        found = local_positions(whole, piece, self.columns, carries, poison)
        return found.nan_to_num(0.0, 0.0, 0.0) if self.clean else found


def _packed(loss_fn: LossFunction, piece: Piece) -> LossFunction:
    if piece.tree is not None:
        return PrefixTreeLossWrapper(loss_fn, piece.tree)  # type: ignore[arg-type]
    true, padded = piece.cu_seqlens, piece.cu_seqlens_padded
    return loss_fn if true is None else SequencePackingLossWrapper(loss_fn, true, padded)  # type: ignore[arg-type]


def cut_step(trial: Trial, layout: Layout, rank: Rank, dtype: torch.dtype, *, consume: bool = False) -> Step:
    """Cut the step's data for this rank; logits come in `dtype`, data never in low precision."""
    case, batch, _, clean = trial
    tp_rank, cp_rank, dp_rank = rank.place
    columns = _columns(trial, layout, tp_rank)
    vocab = None if batch.logits.shape[-1] == 1 else batch.logits.shape[-1]
    loss_fn = case.build(vocab_size=vocab, cp_layout=layout.cp_layout, consume_logits=consume)
    rows = range(dp_rank * batch.rows // layout.dp, (dp_rank + 1) * batch.rows // layout.dp)
    size = len(rows) // layout.micro_batches
    cuts = [list(rows[i : i + size]) for i in range(0, len(rows), size)]
    ids = batch.data["input_ids"]
    pieces = [cut_rows(cut, batch.lengths, batch.width, layout, cp_rank, ids) for cut in cuts]
    kind, carries = torch.promote_types(dtype, torch.float32), carries_loss(batch.data, loss_fn)
    dirty = batch.data if clean else poisoned(batch.data, loss_fn)
    dirty = {**dirty, "input_ids": ids} if layout.packing == "tree" else dirty  # the ids determine the sharing
    data = {name: value.to(kind) if value.dtype == torch.float64 else value for name, value in dirty.items()}
    own = local_names(loss_fn)  # ordered and sharded like the logits
    datas = []
    for piece in pieces:
        part = {name: value[piece.rows] for name, value in data.items() if name not in own}
        for name in own:
            part[name] = local_positions(data[name], piece, columns, carries).view(*piece.shape, len(columns))
        datas.append({name: value.to(rank.device) for name, value in part.items()})
    return Step(loss_fn, columns, pieces, datas, count_valid(datas, rank.groups.data), carries, clean, rank)


def _columns(trial: Trial, layout: Layout, tp_rank: int) -> list[int | None]:
    """Map local columns to global ones (None: padding): uneven, padded, or with a rank of padding alone."""
    vocab = trial.batch.logits.shape[-1]
    if vocab == 1:  # a scalar head
        return [0]
    if layout.packing == "packed" or "padded vocabulary" not in trial.case.axes:  # torch.chunk's shards
        width = -(-vocab // layout.tp)
        return list(range(tp_rank * width, min((tp_rank + 1) * width, vocab)))
    if layout.packing == "padded" and layout.tp > 2:  # even shards, the last one all padding
        width = -(-vocab // (layout.tp - 1))
    else:
        width = -(-(vocab + (1 if layout.packing == "padded" else 5)) // layout.tp)
    return [c if c < vocab else None for c in range(tp_rank * width, (tp_rank + 1) * width)]


def local_positions(
    whole: Tensor, piece: Piece, columns: list[int | None], carries: Tensor, poison: bool = True
) -> Tensor:
    """Cut a [B, S, V] tensor to [T_local, width], with poison at masked places and in padding columns.

    Without `poison` it is a gradient, summed over tokens that share a position.
    """
    carries = piece.joined(carries.long()) > 0
    whole = whole if poison else piece.joined(whole)
    real = [c for c in columns if c is not None]
    rows, places, there = piece.indices()
    there = there & carries[rows, places]
    out = whole.new_full((len(piece.places), len(columns)), 1e4 if poison else 0.0)
    if poison:
        out[:] = torch.where(there[:, None], out, torch.tensor(POISON).repeat(len(out))[: len(out), None].to(whole))
    out[:, : len(real)] = torch.where(there[:, None], whole[rows, places][:, real], out[:, : len(real)])
    return out
