"""Scores of micro-batches by forward passes without gradient: log-probs, a critic's values, a teacher's logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from parallel_rl.cluster.progress import tick
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.one_row import rows_of_tokens
from parallel_rl.losses.scores import token_scores
from parallel_rl.losses.teacher_topk import teacher_topk
from parallel_rl.megatron import (
    FusedHead,
    ScalarHead,
    broadcast_from_last_stage,
    forward_logits,
    forward_only,
    fuse_head,
    unwrap,
)
from parallel_rl.training.batching.micro_batches import MicroBatch
from parallel_rl.training.models.engine import Engine
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.shards import KEEP_ALL, Truncation
from parallel_rl.vocab.stats import IGNORE_INDEX

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


def token_scores_of(
    engine: Engine,
    model: torch.nn.Module,
    batches: Sequence[MicroBatch],
    temperature: float,
    truncation: Truncation = KEEP_ALL,
    *,
    sum_pi_squared: bool = False,
) -> list[Tensor]:
    """Compute token-aligned log-probs [1, B, S] of each micro-batch under `model`, whole on every rank.

    Tokens without loss are 0, tokens outside the truncation −inf. `sum_pi_squared` adds Σ_v π_v²: [2, B, S].
    """

    def collect(logits: Tensor, index: int) -> Tensor:
        groups, batch = engine.groups, batches[index]
        ids = torch.where(valid_tokens(batch.data), batch.data["input_ids"], IGNORE_INDEX)
        scores = token_scores(
            batch.loss_input(logits, head),
            {**batch.data, "input_ids": ids},
            groups.tp_rank,
            groups.tensor,
            groups.context,
            layout=batch.input.layout,
            vocab_size=engine.vocab_size,
            temperature=temperature,
            top_k=truncation.top_k,
            top_p=truncation.top_p,
            entropy=sum_pi_squared,
            sum_pi_squared=sum_pi_squared,
        )
        return torch.stack([x for x in (scores.logprobs, scores.sum_pi_squared) if x is not None])

    with fused_head(engine, model) as head:
        outputs = forward_batches(engine, model, batches, collect)
    return _shared(engine, batches, outputs, (1 + sum_pi_squared,))


def values(critic: Engine, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Compute values [B, S], whole on every rank; column t is the value before token t."""

    def collect(output: Tensor, index: int) -> Tensor:
        layout = batches[index].input.layout
        local = rows_of_tokens(output, layout).flatten().to(critic.float_dtype)
        return layout.unshard(local, critic.groups.context)

    return _shared(critic, batches, forward_batches(critic, critic.model, batches, collect))


def with_teacher_logits(engine: Engine, teacher: torch.nn.Module, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Add the teacher's logits of this rank's tokens and columns, or a fused head's hidden states.

    Only the last stage's micro-batches change.
    """
    with fused_head(engine, teacher) as head:

        def collect(output: Tensor, index: int) -> Tensor | LMHeadInput:
            return output.to(engine.float_dtype) if head is None else batches[index].loss_input(output, head)

        outputs = forward_batches(engine, teacher, batches, collect)
    if outputs is None:
        return list(batches)
    return [batch.with_data(teacher_logits=logits) for batch, logits in zip(batches, outputs, strict=True)]


def with_teacher_topk(
    engine: Engine, teacher: torch.nn.Module, batches: Sequence[MicroBatch], k: int, temperature: float
) -> list[MicroBatch]:
    """Add the teacher's k most likely tokens at each position, whole on every rank, see `teacher_topk`."""
    groups = engine.groups

    def collect(output: Tensor, index: int) -> dict[str, Tensor]:
        batch = batches[index]
        fields = teacher_topk(
            batch.loss_input(output, head), batch.data, k, groups.tp_rank, groups.tensor, groups.context,
            layout=batch.input.layout, vocab_size=engine.vocab_size, temperature=temperature,
        )  # fmt: skip
        return {name: x.to(engine.float_dtype) if x.is_floating_point() else x for name, x in fields.items()}

    with fused_head(engine, teacher) as head:
        outputs = forward_batches(engine, teacher, batches, collect)
    names = ("teacher_topk_logits", "teacher_topk_indices", "teacher_logsumexp")
    return [
        batch.with_data(
            **{name: broadcast_from_last_stage(None if outputs is None else outputs[index][name]) for name in names}
        )
        for index, batch in enumerate(batches)
    ]


def _shared(
    engine: Engine, batches: Sequence[MicroBatch], outputs: list[Tensor] | None, leading: tuple[int, ...] = ()
) -> list[Tensor]:
    """Broadcast the last stage's [..., B, S] tensors; `leading` are the dimensions before."""
    values = outputs if outputs is not None else [None] * len(batches)
    shapes = [torch.Size((*leading, *batch.data["input_ids"].shape)) for batch in batches]
    return [
        broadcast_from_last_stage(
            None if value is None else value.to(engine.float_dtype), shape=shape, dtype=engine.float_dtype
        )
        for value, shape in zip(values, shapes, strict=True)
    ]
