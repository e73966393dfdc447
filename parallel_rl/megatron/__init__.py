"""The integration with megatron-core: models and configs, loss callbacks, schedules, gradients, and CPU support.

Only this package imports megatron.
"""

import importlib
import warnings

from parallel_rl.megatron.cpu import without_builds

with warnings.catch_warnings(), without_builds():
    # Lines that only say what a machine without Transformer Engine, Apex or a GPU knows.
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed|Failed to create unified memory")
    for _name in ("models.gpt.gpt_layer_specs", "optimizer"):
        importlib.import_module(f"megatron.core.{_name}")

from parallel_rl.megatron.attention import SelfAttentionCore
from parallel_rl.megatron.cpu import enable_cpu
from parallel_rl.megatron.forward_only import broadcast_from_last_stage, forward_only, is_last_stage
from parallel_rl.megatron.grads import clip_grads_, grad_norm, gradient, sum_gradients
from parallel_rl.megatron.lm_head import FusedHead, fuse_head
from parallel_rl.megatron.loss import LossReport, megatron_loss_func
from parallel_rl.megatron.model import (
    build_model,
    destroy,
    initialize,
    layer_spec,
    padded_vocab_size,
    unwrap,
    wrap_model,
)
from parallel_rl.megatron.model_config import build_config, has_transformer_engine
from parallel_rl.megatron.model_input import ModelInput, forward_logits, packed_bounds, packed_input, padded_input
from parallel_rl.megatron.norm import ShardedNorm
from parallel_rl.megatron.replicas import replicas
from parallel_rl.megatron.scalar_head import ScalarHead, copy_trunk
from parallel_rl.megatron.weights import global_parameters, initialize_weights, local_shard

__all__ = [
    "FusedHead",
    "LossReport",
    "ModelInput",
    "ScalarHead",
    "SelfAttentionCore",
    "ShardedNorm",
    "broadcast_from_last_stage",
    "build_config",
    "build_model",
    "clip_grads_",
    "copy_trunk",
    "destroy",
    "enable_cpu",
    "forward_logits",
    "forward_only",
    "fuse_head",
    "global_parameters",
    "grad_norm",
    "gradient",
    "has_transformer_engine",
    "initialize",
    "initialize_weights",
    "is_last_stage",
    "layer_spec",
    "local_shard",
    "megatron_loss_func",
    "packed_bounds",
    "packed_input",
    "padded_input",
    "padded_vocab_size",
    "replicas",
    "sum_gradients",
    "unwrap",
    "wrap_model",
]
