"""Models of a run in their layout: trained, critic, frozen."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from parallel_rl.groups import ParallelGroups, current_device, job_backend, take_device
from parallel_rl.megatron import (
    build_config,
    build_model,
    copy_trunk,
    destroy,
    initialize,
    unwrap,
    wrap_model,
)
from parallel_rl.megatron.hf import fill_hf, load_hf, read_hf
from parallel_rl.training.config.load import check_same_config
from parallel_rl.training.config.sections import DTYPES, OptimizerConfig, ParallelConfig, data_parallel_size
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.tokenizer.protocol import Vocabulary
from parallel_rl.vocab.backends.torch_backend import math_dtype


@dataclass(frozen=True)
class Engine:
    """This rank's part of a model and its layout; `model` is wrapped, `bare` is the GPTModel inside."""

    config: TrainConfig
    groups: ParallelGroups
    model: DistributedDataParallel
    vocabulary: Vocabulary
    max_length: int
    device: torch.device

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    @property
    def bare(self) -> GPTModel:
        return unwrap(self.model)

    @property
    def replica_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """List the groups whose ranks hold the same sequences: tensor, context and pipeline."""
        tensor, context = self.groups.tensor, self.groups.context
        assert tensor is not None and context is not None
        return tensor, context, parallel_state.get_pipeline_model_parallel_group()

    @property
    def float_dtype(self) -> torch.dtype:
        """Return the dtype of masks, advantages and log-probs: float64 for a float64 model, else float32."""
        return math_dtype(DTYPES[self.config.run.dtype])


def start_world(config: TrainConfig) -> None:
    """Join torchrun's world, or make a world of one; see `job_backend`.

    Before any communication, ValueError for a world of the wrong size, an unusable machine, or a layout that gloo
    cannot run. On all ranks, ValueError for different configs or tokenizers.
    """
    inside, sizes = dist.is_initialized(), config.parallel
    data_parallel_size(sizes, dist.get_world_size() if inside else int(os.environ.get("WORLD_SIZE", "1")))
    backend = dist.get_backend() if inside else job_backend()
    if backend == "gloo":
        _check_gloo(sizes)
    if not inside:
        take_device()
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(seconds=config.run.timeout))
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    check_same_config(config)


def end_world() -> None:
    """Destroy all process groups and their threads."""
    destroy()
    gc.collect()  # some models are in cycles
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_gloo(sizes: ParallelConfig) -> None:
    """Raise ValueError for a layout that would fail over gloo in its first step."""
    shared = sizes.tensor if sizes.expert_tensor is None else sizes.expert_tensor
    if sizes.expert > 1 and shared > 1:
        raise ValueError(
            f"parallel.expert = {sizes.expert} with parallel.expert_tensor = {shared} does not run over gloo, whose all-gather "
            "takes no parts of different sizes; set parallel.expert_tensor = 1, or use NCCL"
        )
    if not torch.cuda.is_available():
        return
    if sizes.pipeline > 1:
        raise ValueError(
            f"parallel.pipeline = {sizes.pipeline} does not run over gloo on GPUs, which sends tensors of the host only; set "
            "parallel.pipeline = 1, or use NCCL"
        )
    if sizes.overlap_grad_reduce:
        raise ValueError(
            "parallel.overlap_grad_reduce = True does not run over gloo on GPUs, which has no coalesced collectives for them; "
            "set it to false, or use NCCL"
        )


def start_groups(sizes: ParallelConfig, seed: int, timeout: float) -> None:
    """Create Megatron's process groups for a layout."""
    initialize(
        sizes.tensor,
        sizes.context,
        sizes.pipeline,
        ep=sizes.expert,
        etp=sizes.expert_tensor,
        seed=seed,
        timeout=timeout,
    )


def build_engine(config: TrainConfig, tokenizer: Vocabulary, max_length: int) -> Engine:
    """Build the model in Megatron's data parallelism; its weights depend on the seed alone.

    With `model.hf` weights are not initialised, but loaded by `load_first_weights` or from a checkpoint.
    """
    start_groups(config.parallel, config.run.seed, config.run.timeout)
    vocabulary = config.model.vocabulary(tokenizer)
    model = _wrap(config, _build(config, vocabulary.size, max_length, config.scalar_head))
    return Engine(config, ParallelGroups.from_megatron(), model, vocabulary, max_length, current_device())


def build_frozen(config: TrainConfig, vocabulary: Vocabulary) -> GPTModel:
    """Build a model that never trains, for a checkpoint's weights."""
    start_groups(config.parallel, config.run.seed, config.run.timeout)
    model = _build(config, vocabulary.size, config.model.max_positions, config.scalar_head, initialise=False)
    return model.requires_grad_(False)


def freeze_copy(engine: Engine) -> torch.nn.Module:
    """Copy the current weights to a second model that never trains: the reference policy."""
    copy = _build(engine.config, engine.vocab_size, engine.max_length, engine.config.scalar_head, initialise=False)
    with torch.no_grad():
        for target, source in zip(copy.parameters(), engine.bare.parameters(), strict=True):
            target.copy_(source)
    return wrap_model(copy.requires_grad_(False), ddp=False)


def load_first_weights(engine: Engine) -> None:
    """Load the weights of `model.hf`, if set; ValueError on all ranks if they do not fit its config.json."""
    if engine.config.model.hf is not None:
        fill_hf([engine.model], engine.config.model.hf)


def load_frozen(engine: Engine, folder: str) -> torch.nn.Module:
    """Load a teacher, frozen and of its own sizes, from a Hugging Face folder; ValueErrors of `load_hf`."""
    config = engine.config
    [model] = load_hf(
        folder,
        dtype=DTYPES[config.run.dtype],
        sequence_parallel=config.parallel.sequence_parallel,
        vocab_multiple=config.model.vocab_multiple,
    )
    return wrap_model(model.requires_grad_(False), ddp=False)


def build_critic(engine: Engine) -> Engine:
    """Build a critic: a scalar head on a copy of the policy's current trunk."""
    critic = _build(engine.config, engine.vocab_size, engine.max_length, scalar_head=True, initialise=False)
    copy_trunk(engine.bare, critic)
    return replace(engine, model=_wrap(engine.config, critic))


def build_optimizer(engine: Engine, config: OptimizerConfig) -> MegatronOptimizer:
    """Build Megatron's AdamW with fresh moments; `train_step` clips and sets the learning rate."""
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
        use_distributed_optimizer=engine.config.parallel.use_distributed_optimizer,
    )
    with _adam_for(settings.params_dtype):
        return get_megatron_optimizer(settings, [engine.model])


def adam_package(dtype: torch.dtype) -> str:
    """Name the package of `build_optimizer`'s Adam: "transformer_engine", "apex" or "torch"."""
    return "torch" if dtype == torch.float64 else str(megatron_optimizer.Adam.__module__).partition(".")[0]


@contextlib.contextmanager
def _adam_for(dtype: torch.dtype) -> Iterator[None]:
    # Transformer Engine's Adam raises for float64; otherwise the two are equal: decoupled decay,
    # epsilon added to the root of the corrected second moment
    before = megatron_optimizer.USING_PYTORCH_OPTIMIZER
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = before or dtype == torch.float64
    try:
        yield
    finally:
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = before


def _wrap(config: TrainConfig, model: GPTModel) -> DistributedDataParallel:
    """Wrap a model in Megatron's data parallelism, with gradients in float32 at least."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=DTYPES[config.run.dtype].itemsize < 4,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
    )
    return wrap_model(model, ddp=settings)


def _build(
    config: TrainConfig, vocab_size: int, max_length: int, scalar_head: bool, initialise: bool = True
) -> GPTModel:
    model = config.model
    settings = build_config(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.query_groups,
        ffn_hidden_size=model.ffn_hidden,
        kv_channels=model.head_dim,
        dtype=DTYPES[config.run.dtype],
        sequence_parallel=config.parallel.sequence_parallel,
        gated=model.gated,
        qkv_bias=model.qkv_bias,
        qk_norm=model.qk_norm,
        experts=model.experts,
        aux_loss=model.aux_loss,
        norm_epsilon=model.norm_epsilon,
        init_std=model.init_std,
        overrides=None if model.recompute is None else model.recompute.fields,
    )
    built = build_model(
        settings,
        vocab_size,
        max_length,
        position_embedding=model.position,
        rotary_base=model.rope_base,
        rope_scaling=model.rope_scaling,
        tie_embeddings=model.tie_embeddings and not scalar_head,
        vocab_multiple=model.vocab_multiple,
        scalar_head=scalar_head,
        seed=config.run.seed,
        draw_weights=initialise and model.hf is None,
        prefix_trees=config.batch.share_prefixes,
    )
    if model.hf is not None:
        built.hf = read_hf(model.hf)
    return built
