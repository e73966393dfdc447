"""One optimizer step's loss inside megatron-core's schedule: its pipeline, its loss callback, its data parallelism.

The model is a table of logits, one row per place of the batch: the first stage looks them up, later ones add a bias. The
optimizer's gradient is then that of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from parallel_rl.groups import ParallelGroups, current_device
from parallel_rl.losses.core.call import LossCall, LossFunction, LossWrapper
from parallel_rl.losses.core.one_row import PackedSequences
from parallel_rl.megatron import (
    MicroBatch,
    build_config,
    forward_backward,
    gradient,
    initialize,
    packed_input,
    padded_input,
    tree_input,
    wrap_model,
)
from parallel_rl.megatron.process_groups import Context
from parallel_rl.metrics import Metrics
from parallel_rl.testing.alone import Alone
from parallel_rl.testing.cases import Batch, Subject, Trial
from parallel_rl.testing.layouts import Layout, Piece, Rank, cut_rows
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.testing.step import Outcome, add_to_maps, attempt, cut_step
from parallel_rl.testing.subjects import PoolRunner, of_places

_EXACT = 1e-9  # relative, in float64
_GRIDS = {  # tensor, context, data, pipeline; packing
    1: ((1, 1, 1, 1, "padded"), (1, 1, 1, 1, "packed")),
    2: ((1, 1, 1, 2, "padded"), (1, 1, 1, 2, "packed+padding"), (1, 1, 2, 1, "padded")),
    4: ((2, 1, 1, 2, "packed+padding"), (1, 2, 1, 2, "padded"), (1, 1, 2, 2, "padded")),
    8: ((2, 2, 1, 2, "packed+padding"), (1, 2, 2, 2, "padded"), (2, 1, 2, 2, "packed")),
}
preload("parallel_rl.megatron", __name__)


@dataclass(frozen=True)
class SchedulePool:
    """Ranks of this machine in Megatron's groups; `timeout` seconds a call."""

    timeout: float

    def alone(self, subject: Subject, batch: Batch) -> Alone:
        return PoolRunner(self.timeout).alone(subject, batch)

    def run(self, trial: Trial, layouts: Sequence[Layout], dtype: torch.dtype) -> list[list[Outcome]]:
        of_ranks = run_world(layouts[0].world, _rank, layouts, trial, dtype, self.timeout, timeout=self.timeout)
        return [of_places(outcomes) for outcomes in zip(*of_ranks, strict=True)]


def _rank(rank: int, layouts: Sequence[Layout], trial: Trial, dtype: torch.dtype, timeout: float) -> list[Outcome]:
    return [attempt(layout, trial, place(layout, timeout), dtype, run_layout) for layout in layouts]


def schedule_layouts(world: int) -> list[Layout]:
    """Return default layouts of so many ranks, three micro-batches each; [] without defaults.

    >>> [layout.name for layout in schedule_layouts(4)][0]
    'tp2.cp1.dp1.pp2.packed+padding.mb3.zigzag'
    """
    return [Layout(tp, cp, dp, packing, 3, "zigzag", pp) for tp, cp, dp, pp, packing in _GRIDS.get(world, ())]


def place(layout: Layout, timeout: float) -> Rank:
    """Return this rank on Megatron's groups of a layout; the last groups are reused."""
    initialize(layout.tp, layout.cp, layout.pp, timeout=timeout)
    groups = ParallelGroups.from_megatron()
    return Rank(groups, (groups.tp_rank, groups.cp_rank, groups.dp_rank), current_device())


def run_layout(layout: Layout, trial: Trial, rank: Rank, dtype: torch.dtype) -> Outcome:
    """Run an optimizer step through `forward_backward` on this rank; all stages return the same results.

    Padded rows run with `calculate_per_token_loss`, packed ones without: Megatron scales the loss differently then.
    """
    step = cut_step(trial, layout, rank, dtype, consume=layout.micro_batches > 1)
    step = replace(step, carries=_shared(step.carries.long(), trial.batch, layout) > 0)
    rows, width = trial.batch.rows, trial.batch.width
    places: list[tuple[int, int] | None] = [(row, column) for row in range(rows) for column in range(width)]
    whole = Piece(list(range(rows)), [*places, None], None, None)  # the last row is for padding
    config = build_config(
        num_layers=layout.pp, hidden_size=8 * layout.tp, num_attention_heads=layout.tp, dtype=dtype,
        cp_layout=layout.cp_layout, calculate_per_token_loss=layout.packing == "padded",
    )  # fmt: skip
    model = wrap_model(_Stage(config, step.local(trial.batch.logits, whole).to(rank.device, dtype)))
    model.zero_grad_buffer()
    loss_fn, context = _Recorded(step.loss_fn), Context.present(layout.cp_layout)
    batches = [_micro_batch(*pair, context) for pair in zip(step.pieces, step.datas, strict=True)]
    report = forward_backward(model, loss_fn, batches, groups=rank.groups)
    [parameter] = model.parameters()
    grad = gradient(parameter)
    assert grad is not None
    want = _shared(trial.want.gradient, trial.batch, layout)
    grad, truth = grad.cpu().double(), step.local(want, whole, poison=False).double()
    metrics = report.floats()
    del metrics["empty_rows"]  # a metric of the step, not of the loss
    outcome = Outcome(
        sum(loss_fn.values), metrics, 0.0, "", rank.place, torch.zeros(3, rows, width, dtype=torch.float64)
    )
    if grad.dim() == 1:  # a later stage
        truth = truth.sum(0)
    else:
        padding = torch.tensor([column is None for column in step.columns])
        if bool((grad[truth == 0] != 0).any()):
            text = f"{layout.name}: a masked place or a padding column has a gradient"
            outcome = outcome._replace(stray=text, padding_gradient=bool((grad[:, padding] != 0).any()))
        for piece in step.pieces:  # this rank counts its own places of the sum over ranks
            at = _places(piece, width)
            add_to_maps(outcome.maps, piece, grad[at], truth[at])
        outcome = outcome._replace(squared_error=outcome.maps[2].sum().item())
    return _joined(layout, outcome, float((grad - truth).norm() / truth.norm().clamp(min=1e-300)))


def _shared(whole: Tensor, batch: Batch, layout: Layout) -> Tensor:
    """Sum [B, S, ...] over tokens that share a position, in all trees of all data ranks."""
    if layout.packing != "tree":
        return whole
    size, ids = batch.rows // (layout.dp * layout.micro_batches), batch.data["input_ids"]
    cuts = [list(range(first, first + size)) for first in range(0, batch.rows, size)]
    pieces = [cut_rows(cut, batch.lengths, batch.width, layout, 0, ids) for cut in cuts]
    return torch.stack([piece.joined(whole) for piece in pieces]).sum(0)


def _joined(layout: Layout, mine: Outcome, off: float) -> Outcome:
    """Join the first stage's gradient with the last one's loss; `off` is this stage's relative error."""
    of_stages = [(mine, off)] * layout.pp
    if layout.pp > 1:
        dist.all_gather_object(of_stages, (mine, off), group=parallel_state.get_pipeline_model_parallel_group())
    (first, right), (last, _) = of_stages[0], of_stages[-1]
    wrong = [stage for stage, (_, error) in enumerate(of_stages) if not error <= _EXACT]
    if right <= _EXACT and wrong:
        first = first._replace(
            error=f"the gradient of pipeline stage {wrong[0]} is off by {of_stages[wrong[0]][1]:.1e}"
        )
    return first._replace(share=last.share, metrics=last.metrics)


def _places(piece: Piece, width: int) -> Tensor:
    """Return [T_local] rows of the table; −1, the last row, for padding."""
    rows, columns, there = piece.indices()
    return torch.where(there, rows * width + columns, -1)


def _micro_batch(piece: Piece, data: Mapping[str, Tensor], context: Context) -> MicroBatch:
    ids = data["input_ids"].clamp(min=0)  # wild ids are at places without loss; the model looks up places, not ids
    if piece.tree is not None:
        packed, model_input = None, tree_input(piece.tree, context, ids.device)
    elif piece.cu_seqlens is None:
        packed, model_input = None, padded_input(ids, context)
    else:
        bounds = piece.cu_seqlens if piece.cu_seqlens_padded is None else piece.cu_seqlens_padded
        packed = PackedSequences(piece.cu_seqlens.to(ids.device), bounds.to(ids.device))
        model_input = packed_input(ids, piece.cu_seqlens, bounds, context)
    tokens = _places(piece, ids.shape[1]).view(piece.shape).to(ids.device)
    return MicroBatch(replace(model_input, tokens=tokens), data, packed)


class _Stage(MegatronModule):
    """One pipeline stage: the first looks its tokens up in the table, each later one adds a bias of zeros."""

    model_type, share_embeddings_and_output_weights = ModelType.encoder_or_decoder, False  # read by the schedule

    def __init__(self, config: TransformerConfig, table: Tensor) -> None:
        super().__init__(config)
        self.pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        self.post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.table = torch.nn.Parameter(table if self.pre_process else torch.zeros_like(table[0]))
        set_tensor_model_parallel_attributes(self.table, True, -1, 1)  # tensor ranks hold other columns
        self.output_layer = torch.nn.Identity()  # a row of the table is logits already
        self.received: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Receive the previous stage's output from Megatron's schedule."""
        self.received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, tokens: Tensor, positions: Tensor, mask: None, packed_seq_params: object = None) -> Tensor:
        """Return [S/cp, B, V/tp] for the next stage, or [B, S/cp, V/tp] for the loss."""
        if self.pre_process:
            out = self.table[tokens.t().contiguous()]
        else:
            assert self.received is not None
            out = self.received + self.table
        return out.transpose(0, 1).contiguous() if self.post_process else out


class _Recorded(LossWrapper):
    """Loss that records its local values."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn, self.values = loss_fn, [0.0]

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        loss, metrics = self.loss_fn.run(call)
        self.values.append(loss.item())
        return loss, metrics
