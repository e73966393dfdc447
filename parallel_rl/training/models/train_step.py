"""One optimizer step: gradients of the global loss over all micro-batches, clipping, AdamW, and its dump to explain."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.core.optimizer import MegatronOptimizer

from parallel_rl.cluster.progress import tick
from parallel_rl.explain.dump import DumpError, StepInfo, dump_step
from parallel_rl.groups import ParallelGroups
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.megatron import clip_grads_, forward_backward, grad_norm
from parallel_rl.training.batching.micro_batches import MicroBatch
from parallel_rl.training.config.train import TrainConfig
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


@dataclass(frozen=True)
class StepDump:
    """Optimizer step to dump, by its `number` from 1, and its destination."""

    number: int
    folder: Path
    title: str
    text_of_token: Callable[[int], str]
    pipeline: int

    @classmethod
    def of(
        cls, config: TrainConfig, phase: str, number: int | None, decode: Callable[[list[int]], str]
    ) -> StepDump | None:
        """Make the dump of a run's optimizer step, in its folder; None if none is requested."""
        if number is None:
            return None
        run, name = Path(config.run.dir), f"{phase} step {number}"
        folder = run / "dumps" / f"{phase}_step_{number:06d}"
        return cls(number, folder, f"{run.name}, {name}", partial(_text, decode), config.parallel.pipeline)

    @contextmanager
    def around(self, loss_fn: LossFunction, done: int, groups: ParallelGroups) -> Iterator[LossFunction]:
        """Wrap the loss of the step after `done` ones; a failed dump is reported on stderr only."""
        if done + 1 != self.number:
            yield loss_fn
            return
        try:
            info = StepInfo(self.title, self.text_of_token, self.pipeline)
            with dump_step(self.folder, loss_fn, groups=groups, info=info) as recording:
                yield recording
        except DumpError as error:
            print(f"parallel-rl: {error}", file=sys.stderr, flush=True)


def _text(decode: Callable[[list[int]], str], token: int) -> str:
    """Decode a token inside others: some tokenizers drop the space before the first."""
    return decode([token, token])[len(decode([token])) :]
