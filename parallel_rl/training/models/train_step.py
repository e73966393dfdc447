"""One optimizer step: gradients of the global loss over all micro-batches, their norm, clipping, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from parallel_rl.cluster.heartbeat import tick
from parallel_rl.counts import count_valid
from parallel_rl.losses.core.base import LossFn
from parallel_rl.megatron import clip_grads_, forward_logits, grad_norm, is_last_stage, megatron_loss_func
from parallel_rl.megatron.loss import LossReport
from parallel_rl.metrics import Metrics, reduce_metrics
from parallel_rl.statistics import Statistics
from parallel_rl.training.batching.micro_batches import MicroBatch
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.models.forward import forward_batches, fused_head, loss_input

StepMetrics = dict[str, float]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports, equal on every rank."""

    metrics: dict[str, float]
    grad_norm: float
    tokens: int


def train_step(
    engine: Engine,
    optimizer: MegatronOptimizer,
    batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    lr: float,
    clip: float | None,
) -> StepResult:
    """One optimizer step on this data rank's micro-batches: gradients of the global loss, their norm, clip, AdamW.

    A loss that needs statistics of the step sees all micro-batches once before, without gradient.
    """
    seqs, toks = count_valid([batch.data for batch in batches], engine.groups.data)
    statistics = _statistics(engine, batches, loss_fn, seqs, toks) if loss_fn.needs_statistics else None
    engine.model.zero_grad_buffer()
    optimizer.zero_grad()
    config = engine.bare.config

    def forward(queue: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], object]]:
        batch = next(queue)
        tick("training")
        wrapped = batch.wrap(loss_fn)
        loss_func = megatron_loss_func(
            wrapped if statistics is None else partial(wrapped, statistics=statistics),
            batch.data,
            seqs,
            toks,
            config=config,
            num_microbatches=len(batches),
            groups=engine.groups,
            head=partial(loss_input, engine, head, batch),
        )
        return forward_logits(model, batch.input), loss_func

    with fused_head(engine, engine.model) as head:
        reports: list[LossReport] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[engine.model],
            num_microbatches=len(batches),
            seq_length=batches[0].input.tokens.shape[1] * engine.groups.cp_size,
            micro_batch_size=batches[0].input.tokens.shape[0],
            forward_only=False,
        )
    norm = grad_norm([engine.model])
    if not bool(
        norm.isfinite()
    ):  # the same number on every rank; a step would ruin the weights and the next checkpoint
        raise ValueError(f"the gradient norm is {float(norm)}; the last good checkpoint stands, see metrics.jsonl")
    if clip is not None:
        clip_grads_([engine.model], clip, norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = optimizer.config.weight_decay * group.get("wd_mult", 1.0)
    optimizer.step()
    return StepResult(_reduced(engine, reports), float(norm), int(toks))


def _statistics(
    engine: Engine, batches: Sequence[MicroBatch], loss_fn: LossFn, seqs: Tensor, toks: Tensor
) -> Statistics:
    """What the loss collects over all micro-batches of all ranks; nothing on the stages that compute no loss."""
    groups = engine.groups

    def collect(logits: Tensor, index: int) -> Statistics:
        batch = batches[index]
        return batch.wrap(loss_fn).collect(
            loss_input(engine, head, batch, logits),
            batch.data,
            seqs,
            toks,
            groups.tp_rank,
            groups.tensor,
            groups.context,
        )

    with fused_head(engine, engine.model) as head:
        found = forward_batches(engine, engine.model, batches, collect)
    return Statistics({}) if found is None else reduce(add, found).reduce(groups)


def _reduced(engine: Engine, reports: Sequence[LossReport]) -> dict[str, float]:
    """The last stage knows the metrics; it tells the others."""
    found: list[dict[str, float] | None] = [None]
    if is_last_stage():
        reduced = reduce_metrics([_metrics(report) for report in reports], engine.groups)
        values = torch.stack(list(reduced.values())).tolist()  # one copy to the host
        found = [dict(zip(reduced, values, strict=True))]
    if engine.config.parallel.pipeline > 1:
        from megatron.core import parallel_state

        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(found, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    assert found[0] is not None
    return found[0]


def _metrics(report: LossReport) -> Metrics:
    metrics = report["metrics"]
    assert isinstance(metrics, Metrics)
    return metrics
