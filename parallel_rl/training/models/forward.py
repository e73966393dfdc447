"""Forward passes without gradient, and the fused LM head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from parallel_rl.cluster.heartbeat import tick
from parallel_rl.megatron import FusedHead, ScalarHead, forward_logits, forward_only, fuse_head, unwrap
from parallel_rl.training.batching.micro_batches import MicroBatch
from parallel_rl.training.models.engine import Engine

ResultT = TypeVar("ResultT")


@contextlib.contextmanager
def fused_head(engine: Engine, model: torch.nn.Module) -> Iterator[FusedHead | None]:
    """Return hidden states in a `with` block if `model.fused_head`; yields the losses' adapter."""
    bare = unwrap(model)
    if not engine.config.model.fused_head or (bare.post_process and isinstance(bare.output_layer, ScalarHead)):
        yield None
        return
    head = fuse_head(bare)
    try:
        yield head
    finally:
        head.remove()


def forward_batches(
    engine: Engine, model: torch.nn.Module, batches: Sequence[MicroBatch], collect: Callable[[Tensor, int], ResultT]
) -> list[ResultT] | None:
    """Run `collect(output, index)` on each micro-batch, without gradient; None on all stages but the last."""

    def forward(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        tick("scoring")
        return forward_logits(model, batch.input)

    return forward_only(
        forward,
        [model],
        batches,
        collect,
        seq_length=batches[0].width,
        micro_batch_size=batches[0].input.tokens.shape[0],
    )
