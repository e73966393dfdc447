"""The models of a run in their layout: the trained one, a critic, a frozen one; and the training step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, reduce
from operator import add
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from parallel_rl.cluster.heartbeat import tick
from parallel_rl.counts import count_valid
from parallel_rl.groups import ParallelGroups
from parallel_rl.losses.core.base import LossFn
from parallel_rl.megatron import (
    FusedHead,
    ScalarHead,
    build_config,
    build_model,
    clip_grads_,
    copy_trunk,
    forward_logits,
    forward_only,
    fuse_head,
    grad_norm,
    initialize,
    is_last_stage,
    megatron_loss_func,
    unwrap,
    wrap_model,
)
from parallel_rl.megatron.loss import LossReport
from parallel_rl.metrics import Metrics, reduce_metrics
from parallel_rl.statistics import Statistics
from parallel_rl.training.batching.micro_batches import MicroBatch
from parallel_rl.training.config.sections import DTYPES, OptimizerConfig, data_parallel_size
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.linear.lm_head import LMHeadInput

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Engine:
    """This rank's part of the trained model and of its layout; `model` is wrapped, `bare` is the GPTModel inside."""

    config: TrainConfig
    groups: ParallelGroups
    model: DistributedDataParallel
    vocab_size: int
    max_length: int
    device: torch.device

    @property
    def bare(self) -> GPTModel:
        return unwrap(self.model)

    @property
    def numbers(self) -> torch.dtype:
        """Of masks, advantages and log-probs: float32, or float64 where the model is."""
        return math_dtype(DTYPES[self.config.run.dtype])


def start_world(config: TrainConfig) -> None:
    """Joins torchrun's world, or makes a world of one.

    Raises:
        ValueError: the world's size does not match the config; before anything communicates.
    """
    inside = dist.is_initialized()
    data_parallel_size(config.parallel, dist.get_world_size() if inside else int(os.environ.get("WORLD_SIZE", "1")))
    if inside:
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if on_gpu else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(seconds=config.run.timeout))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def build_engine(config: TrainConfig, vocab_size: int, max_length: int) -> Engine:
    """The model with its first weights, which depend on the seed alone, wrapped in Megatron's data parallelism."""
    sizes = config.parallel
    initialize(sizes.tensor, sizes.context, sizes.pipeline, seed=config.run.seed, timeout=config.run.timeout)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = wrap_model(_build(config, vocab_size, max_length, config.scalar_head))
    return Engine(config, ParallelGroups.from_megatron(), model, vocab_size, max_length, device)


def freeze_copy(engine: Engine) -> torch.nn.Module:
    """A second model with the present weights, which never trains: the reference policy."""
    copy = _build(engine.config, engine.vocab_size, engine.max_length, engine.config.scalar_head)
    with torch.no_grad():
        for ours, theirs in zip(copy.parameters(), engine.bare.parameters(), strict=True):
            ours.copy_(theirs)
    return wrap_model(copy.requires_grad_(False), ddp=False)


def build_critic(engine: Engine) -> Engine:
    """A second model to train, with a scalar head on a copy of the policy's present trunk."""
    critic = _build(engine.config, engine.vocab_size, engine.max_length, scalar_head=True)
    copy_trunk(engine.bare, critic)
    return replace(engine, model=wrap_model(critic))


def build_optimizer(engine: Engine, config: OptimizerConfig) -> MegatronOptimizer:
    """Megatron's AdamW with fresh moments; clipping and the learning rate are `train_step`'s."""
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=0.0,
        bf16=engine.config.run.dtype == "bfloat16",
        params_dtype=DTYPES[engine.config.run.dtype],
    )
    return get_megatron_optimizer(settings, [engine.model])


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


@contextlib.contextmanager
def fused_head(engine: Engine, model: torch.nn.Module) -> Iterator[FusedHead | None]:
    """Inside, the model gives hidden states where `model.fused_head` asks for it; yields what makes losses' input of them."""
    bare = unwrap(model)
    if not engine.config.model.fused_head or (bare.post_process and isinstance(bare.output_layer, ScalarHead)):
        yield None
        return
    head = fuse_head(bare)
    try:
        yield head
    finally:
        head.remove()


def loss_input(engine: Engine, head: FusedHead | None, batch: MicroBatch, output: Tensor) -> Tensor | LMHeadInput:
    """The model's output as a loss takes it; a fused head projects only the rows that carry loss, which the host counts."""
    if head is None:
        return output
    sizes = engine.config.parallel
    return head(output, batch.carrying(sizes.tensor if sizes.sequence_parallel else 1))


def forward_batches(
    engine: Engine, model: torch.nn.Module, batches: Sequence[MicroBatch], collect: Callable[[Tensor, int], ResultT]
) -> list[ResultT] | None:
    """What `collect` makes of the output on each micro-batch, without gradient; None on all stages but the last."""

    def forward(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        tick("scoring")
        return forward_logits(model, batch.input)

    return forward_only(
        forward,
        [model],
        batches,
        collect,
        seq_length=batches[0].input.tokens.shape[1] * engine.groups.cp_size,
        micro_batch_size=batches[0].input.tokens.shape[0],
    )


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


def _build(config: TrainConfig, vocab_size: int, max_length: int, scalar_head: bool = False) -> GPTModel:
    model = config.model
    settings = build_config(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.query_groups,
        ffn_hidden_size=model.ffn_hidden,
        dtype=DTYPES[config.run.dtype],
        sequence_parallel=config.parallel.sequence_parallel,
        gated=model.gated,
        recompute=model.recompute,
        init_std=model.init_std,
    )
    return build_model(
        settings,
        vocab_size,
        max_length,
        position_embedding=model.position,
        tie_embeddings=model.tie_embeddings,
        vocab_multiple=model.vocab_multiple,
        scalar_head=scalar_head,
        seed=config.run.seed,
    )


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
