"""One optimizer step: gradients of the global loss over all micro-batches, norm, clipping, AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron.core.optimizer import MegatronOptimizer

from parallel_rl.cluster.heartbeat import tick
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.megatron import clip_grads_, forward_backward, grad_norm
from parallel_rl.training.batching.micro_batches import MicroBatch
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.models.scoring import fused_head

StepMetrics = dict[str, float]


@dataclass(frozen=True)
class StepResult:
    """Report of an optimizer step, equal on every rank; a skipped one has no metrics."""

    metrics: dict[str, float]
    grad_norm: float
    tokens: int
    skipped: bool = False


def train_step(
    engine: Engine,
    optimizer: MegatronOptimizer,
    batches: Sequence[MicroBatch],
    loss_fn: LossFunction,
    *,
    lr: float,
    clip: float | None,
    spike: float | None = None,
) -> StepResult:
    """Make one optimizer step on this data rank's micro-batches.

    A loss that `needs_collect` first reads all micro-batches without gradient. A norm that is not finite or above `spike`
    leaves the weights unchanged.
    """
    engine.model.zero_grad_buffer()
    optimizer.zero_grad()
    with fused_head(engine, engine.model) as head:
        report = forward_backward(
            engine.model, loss_fn, batches, head=head, groups=engine.groups, before_forward=partial(tick, "training")
        )
    norm = grad_norm([engine.model])
    size = float(norm)  # equal on every rank
    if not math.isfinite(size) or (spike is not None and size > spike):
        return StepResult({}, size, int(report.counts.toks), skipped=True)
    if clip is not None:
        clip_grads_([engine.model], clip, norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = optimizer.config.weight_decay * group.get("wd_mult", 1.0)
    optimizer.step()
    return StepResult(report.floats(), size, int(report.counts.toks))
