"""The calls of one optimizer step on one rank of a layout: its micro-batches' data, poisoned, counted and cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.agreement import describe
from parallel_rl.counts import ValidCounts, count_valid
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.metrics import Metrics
from parallel_rl.packing import PrefixTreeLossWrapper, SequencePackingLossWrapper
from parallel_rl.testing.batches import POISON, carries_loss, local_names, poisoned
from parallel_rl.testing.cases import Trial, empty_rows_on_purpose, reduced_numbers, step_statistics
from parallel_rl.testing.layouts import Layout, Piece, Rank, cut_rows, make_groups
from parallel_rl.vocab.linear.lm_head import LMHeadInput


@dataclass(frozen=True)
class Step:
    """This rank's part of a step."""

    loss_fn: LossFunction
    columns: list[int | None]  # the global column of each local one (None: padding)
    pieces: list[Piece]  # the sources of local positions, per micro-batch
    datas: list[dict[str, Tensor]]  # per micro-batch, with NaN, inf and wild ids at places without loss
    counts: ValidCounts  # of the whole step
    carries: Tensor  # [B, S] whether the output at a position of the whole batch matters to the loss
    clean: bool  # no poison
    rank: Rank

    def run(
        self, outputs: Sequence[Tensor | LMHeadInput], fields: Sequence[Mapping[str, LMHeadInput]] = ()
    ) -> Iterator[tuple[Tensor, Metrics]]:
        """Compute loss and metrics of each micro-batch from the model's outputs, after the step's statistics.

        `fields` replace fields of `datas`, per micro-batch.
        """
        groups = self.rank.groups
        more = fields or [{} for _ in outputs]
        calls = []
        for output, data, replaced in zip(outputs, self.datas, more, strict=True):
            both: dict[str, Tensor | LMHeadInput] = {**data, **replaced}
            calls.append((output, both, *self.counts, groups.tp_rank, groups.tensor, groups.context))
        losses = [_packed(self.loss_fn, piece) for piece in self.pieces]
        statistics = step_statistics([*zip(losses, calls, strict=True)], groups)
        for loss_fn, call in zip(losses, calls, strict=True):
            yield loss_fn(*call, statistics=statistics)

    def local(self, whole: Tensor, piece: Piece, poison: bool = True) -> Tensor:
        """Cut a [B, S, V] tensor to this rank's columns, [T_local, width], see `local_positions`."""
        carries = torch.ones_like(self.carries) if self.clean else self.carries
        field = local_positions(whole, piece, self.columns, carries, poison)
        return field.nan_to_num(0.0, 0.0, 0.0) if self.clean else field


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
    names = local_names(loss_fn)  # ordered and sharded like the logits
    datas = []
    for piece in pieces:
        part = {name: value[piece.rows] for name, value in data.items() if name not in names}
        for name in names:
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


_PATIENCE = 5.0  # seconds


class Outcome(NamedTuple):
    """Result of one rank on one layout."""

    share: float  # the local loss
    metrics: dict[str, float]  # reduced
    squared_error: float  # of this rank's piece of the gradient
    stray: str  # a gradient at a place without loss
    place: tuple[int, int, int]  # (tensor, context, data) rank
    # [3, B, S] g·g*, |g*|² and |g − g*|² of each position's gradient g and reference g*; 0 on other ranks' positions
    maps: Tensor
    padding_gradient: bool = False  # in a padding column of the vocabulary
    error: str = ""  # the exception, instead of all else


def run_layout(layout: Layout, trial: Trial, rank: Rank, dtype: torch.dtype) -> Outcome:
    """Run one optimizer step's loss on this rank, with logits of `dtype`."""
    batch = trial.batch
    step = cut_step(trial, layout, rank, dtype, consume=layout.micro_batches > 1)
    leaves = [step.local(batch.logits, piece).to(rank.device, dtype).requires_grad_() for piece in step.pieces]
    outputs = [(leaf * 1.0).view(*piece.shape, -1) for leaf, piece in zip(leaves, step.pieces, strict=True)]
    share, metrics, stray, padding_gradient = 0.0, [], "", False
    padding = torch.tensor([column is None for column in step.columns])
    maps = torch.zeros(3, batch.rows, batch.width, dtype=torch.float64)
    for (loss, parts), leaf, piece in zip(step.run(outputs), leaves, step.pieces, strict=True):
        loss.backward()
        share += loss.item()
        metrics.append(parts)
        gradient = torch.zeros(leaf.shape) if leaf.grad is None else leaf.grad.cpu()
        truth = step.local(trial.want.gradient, piece, poison=False)
        add_to_maps(maps, piece, gradient.double(), truth)
        if bool((gradient[truth == 0] != 0).any()):
            stray = f"{layout.name}: a masked place or a padding column has a gradient"
            padding_gradient |= bool((gradient[:, padding] != 0).any())
    reduced = reduced_numbers(metrics, rank.groups)
    return Outcome(share, reduced, maps[2].sum().item(), stray, rank.place, maps, padding_gradient)


RunLayout = Callable[[Layout, Trial, Rank, torch.dtype], Outcome]


def add_to_maps(maps: Tensor, piece: Piece, gradient: Tensor, truth: Tensor) -> None:
    """Add a piece's gradient and reference to `Outcome.maps`."""
    rows, columns, _ = piece.indices()  # padding counts at the first row
    numbers = torch.stack([gradient * truth, truth.square(), (gradient - truth).square()]).sum(-1)
    maps.view(3, -1).index_add_(1, rows * maps.shape[2] + columns, numbers)


def check_world(
    rank: int, of_world: Sequence[Layout], trials: list[Trial], dtype: torch.dtype, keep_going: bool = False
) -> list[tuple[str, str, Outcome]]:
    """Run every case on every layout; return (case, layout, outcome).

    With `keep_going` an error is an outcome, and ranks agree after each layout, which locates a hung collective.
    """
    outcomes = []
    ranks: dict[tuple[int, int], Rank] = {}
    for layout in of_world:
        key = (layout.tp, layout.cp)
        if key not in ranks:
            ranks[key] = Rank(*make_groups(rank, dist.get_world_size(), *key))
        for trial in trials:
            run = attempt if keep_going else run_layout
            outcomes.append((trial.case.name, layout.name, run(layout, trial, ranks[key], dtype)))
    return outcomes


@empty_rows_on_purpose()
def attempt(layout: Layout, trial: Trial, rank: Rank, dtype: torch.dtype, run: RunLayout = run_layout) -> Outcome:
    """Call `run`, with an error as outcome; RuntimeError if another rank hangs until the world's timeout."""
    try:
        outcome = run(layout, trial, rank, dtype)
    except (Exception, SystemExit) as error:
        maps = torch.zeros(3, trial.batch.rows, trial.batch.width, dtype=torch.float64)
        outcome = Outcome(torch.nan, {}, torch.nan, "", rank.place, maps, error=describe(error))
    arrived = dist.barrier(async_op=True)
    try:
        if outcome.error:
            _wait_a_little(arrived)
        arrived.wait()
    except RuntimeError as error:
        why = outcome.error or "it waited for another rank, which did not come out of the loss"
        raise RuntimeError(f"{trial.case.name} on {layout.name}: {why}") from error
    return outcome


def _wait_a_little(arrived: dist.Work) -> None:
    """Wait briefly for other ranks after an error; RuntimeError if they hang in a collective of the loss."""
    end = time.monotonic() + _PATIENCE
    while not arrived.is_completed():
        if time.monotonic() > end:
            raise RuntimeError("the other ranks did not arrive")
        time.sleep(0.01)
